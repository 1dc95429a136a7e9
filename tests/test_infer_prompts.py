"""Prompts of a benchmark: files of all kinds, categories, conversations, and what goes out in Spec-Bench's format."""

import json
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer.benchmark import BenchmarkOptions
from infer.benchmarking.questions import all_questions, first_questions
from infer.command import main
from infer.errors import InputError
from infer.loading import Loaded
from infer.prompt_file import Prompt, read_jsonl_texts, read_prompts
from infer.prompts import BUILT_IN, find_prompts
from infer.terminal import Terminal
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def write(path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


@pytest.fixture
def loaded(tokenizer):
    model = tiny.endless(tiny.llama(vocab_size=len(tokenizer)))
    own = tiny.tokenizer()
    own.chat_template = TEMPLATE
    return Loaded("tiny", model, own)


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"text": "b"}\n{"text": ""}\n{"prompt": "a"}\n')
    assert texts(read_prompts(file)) == ["a", "b"]
    assert read_jsonl_texts(file) == ("a", "b")
    found = find_prompts(str(file), None, need_validation=True)
    assert (texts(found.validation), texts(found.test)) == (["a"], ["b"])
    assert found.left_out == (
        f"{file} line 4 is empty and left out",
        f"{file} line 5 repeats {file} line 1 and is left out",
    )
    assert texts(find_prompts(str(file), None, need_validation=False).test) == ["a", "b"]


def test_conversations_are_found_out_by_their_keys(tmp_path):
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "hello"}
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"messages": [*said, answer]},
        {"messages": [*said, answer, {"role": "user", "content": "why"}]},
        {"prompt": "x", "category": "qa", "question_id": "q7"},
    ]
    first, second, third, fourth = read_prompts(tmp_path / write(tmp_path / "all.jsonl", *rows))
    assert (first.messages, first.turns) == ((("user", "one"),), ("two",))
    assert (first.question_id, first.category) == (81, "writing")
    assert second.messages == (("system", "be brief"), ("user", "hi"))  # what the model said is what is asked for
    assert [content for _, content in third.messages] == ["be brief", "hi", "hello", "why"]
    assert (fourth.text, fourth.category, fourth.question_id) == ("x", "qa", "q7")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n["b"]\n', "line 2 is not a prompt"),
        ('{"question": "a"}\n', "line 1 is not a prompt"),
        ("plain text\n", "line 1 is not a prompt"),
        ("\n", "holds no prompts"),
        ('{"turns": []}\n', "line 1 has no turns"),
        ('{"turns": [["a"]]}\n', "line 1 has no turns"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1 asks nothing"),
        ('{"messages": [{"role": "user", "content": [{"image": "x"}]}]}\n', "line 1 asks nothing"),
        ('{"prompt": "a"}\n', "holds one prompt, but several settings need"),
    ],
)
def test_prompt_files_that_will_not_do(text, said, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(InputError, match=said):
        find_prompts(str(tmp_path / "x"), None, need_validation=True)


def test_the_models_own_prompts_come_before_the_built_in_ones(tmp_path):
    assert set(texts(find_prompts(None, tmp_path, need_validation=False).test)) == set(BUILT_IN)
    halves = find_prompts(None, None, need_validation=True)
    assert len(halves.validation) == len(halves.test) == 6
    assert not set(halves.validation) & set(halves.test)
    (tmp_path / "prompts").mkdir()
    for split, letters in (("validation", "abc"), ("test", "cde")):
        write(tmp_path / "prompts" / f"{split}.jsonl", *({"prompt": text} for text in letters))
    found = find_prompts(None, tmp_path, need_validation=True)
    assert (texts(found.validation), texts(found.test)) == (["a", "b", "c"], ["d", "e"])  # c was seen while choosing


def test_categories_take_turns_in_both_sets(tmp_path):
    rows = [{"prompt": f"{kind}{i}", "category": kind} for kind in "abc" for i in range(4)]
    file = write(tmp_path / "all.jsonl", *rows)
    assert texts(find_prompts(file, None, need_validation=False).test)[:6] == ["a0", "b0", "c0", "a1", "b1", "c1"]
    found = find_prompts(file, None, need_validation=True)
    assert texts(found.test) == ["a0", "b0", "c0", "a2", "b2", "c2"]
    assert texts(found.validation) == ["a1", "b1", "c1", "a3", "b3", "c3"]
    assert found.notes(3) == []
    assert found.notes(2) == ["note: --num-prompts 2 takes prompts of 2 of 3 categories: raise it"]


def test_a_turn_is_asked_with_plain_decodings_answers_before_it(loaded, capsys):
    prompt = Prompt(messages=(("user", "the quick"),), turns=("lazy dog", "def add"))
    options = BenchmarkOptions(max_new_tokens=7, prompt_tokens=2)  # conversations are not cut
    questions = all_questions(loaded, [prompt], options, Terminal())
    assert [question.turn for question in questions] == [0, 1, 2]
    conversation = []
    for question, said in zip(questions, ("the quick", "lazy dog", "def add"), strict=True):
        conversation.append({"role": "user", "content": said})
        ids = loaded.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        assert torch.equal(question.input_ids, ids)
        new = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
        answer = loaded.tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        conversation.append({"role": "assistant", "content": answer})
    # Without room for a third turn the conversation ends before it, and says so.
    loaded.model.config.max_position_embeddings = questions[1].input_ids.shape[1] + 7
    assert [question.turn for question in all_questions(loaded, [prompt], options, Terminal())] == [0, 1]
    assert "positions: left out" in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_told_and_left_out(loaded, capsys):
    options = BenchmarkOptions(max_new_tokens=100, num_prompts=2)
    long, short, other = (Prompt(messages=(("user", text),), where=text[:3]) for text in ("z. " * 200, "abc", "def"))
    found = first_questions(loaded, [long, short, other], options)
    assert [question.prompt for question in found] == [short, other]
    assert "note: z.  has " in capsys.readouterr().err
    with pytest.raises(InputError, match="no prompt fits"):
        first_questions(loaded, [long], options)


def spec_bench_speed(file, category: str | None = None) -> tuple[float, float]:
    """What Spec-Bench's script reads from a file of answers: here of all questions together, since that is what our
    table has, and the mean accepted length."""
    tokens, seconds, lengths = 0, 0.0, []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        choice = record["choices"][0]
        if category in (None, record["category"]):
            tokens, seconds = tokens + sum(choice["new_tokens"]), seconds + sum(choice["wall_time"])
            lengths += choice["accept_lengths"]
    return tokens / seconds, mean(lengths)


def test_answers_read_back_as_spec_bench_does_are_the_tables_numbers(tiny_checkpoint, tmp_path, capsys):
    rows = [
        {"question_id": 3, "category": "writing", "turns": ["the quick brown", "lazy dog"]},
        {"question_id": 5, "category": "coding", "turns": ["def add(a, b):"]},
        {"prompt": "", "category": "qa"},
        {"question_id": 8, "category": "qa", "turns": ["the fox", "over", "return a"]},
    ]
    file, folder = write(tmp_path / "question.jsonl", *rows), tmp_path / "answers"
    flags = ("--exit-layers", "2", "--num-draft-tokens", "3", "--repeats", "1", "--max-new-tokens", "10")
    arms = ("--arms", "chain,transformers-lookup", "--prompts", file, "--answers", str(folder))
    assert main(["benchmark", str(tiny_checkpoint), *flags, *arms]) == 0
    captured = capsys.readouterr()
    assert f"note: {file} line 3 is empty and left out" in captured.err
    shown, _, last = captured.out.rstrip("\n").rpartition("\n")
    result = json.loads(last)
    assert (result["conditions"]["num_questions"], result["conditions"]["num_prompts"]) == (3, 6)
    assert "speedup by category" in shown
    for record in result["greedy"]:
        assert record["equal_outputs"] == 6
        assert list(record["by_category"]) == ["writing", "coding", "qa", "mt_bench"]
        answers = folder / f"{record['arm']}.jsonl"
        speed, length = spec_bench_speed(answers)
        assert speed == pytest.approx(record["tokens_per_second"], rel=1e-3)
        assert length == pytest.approx(record.get("mean_acceptance_length", 1.0), abs=1e-4)
        for category in ("writing", "coding", "qa"):
            speed, _ = spec_bench_speed(answers, category)
            part = record["by_category"][category]
            assert speed == pytest.approx(part["tokens_per_second"], rel=1e-3)
            plain = result["greedy"][0]["by_category"][category]
            assert part["speedup"] == pytest.approx(speed / plain["tokens_per_second"], rel=1e-3)
        both = record["by_category"]["mt_bench"]["tokens"]
        assert both == sum(record["by_category"][name]["tokens"] for name in ("writing", "coding"))
    first, *others = [json.loads(line) for line in (folder / "plain.jsonl").read_text().splitlines()]
    assert (first["question_id"], first["category"], len(first["choices"][0]["turns"])) == (3, "writing", 2)
    assert set(first) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert [len(other["choices"][0]["wall_time"]) for other in others] == [1, 3]
    # The text is the model's own.
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    ids = tiny.tokenizer()("the quick brown", return_tensors="pt").input_ids
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert first["choices"][0]["turns"][0] == tiny.tokenizer().decode(new, skip_special_tokens=True)


def test_a_failed_turn_leaves_its_question_out(loaded, tmp_path):
    from infer.benchmarking.arms import plain
    from infer.benchmarking.measurement import Measured
    from infer.benchmarking.spec_bench import write_answers

    prompts = [Prompt(messages=(("user", "one"),), turns=("two",)), Prompt(messages=(("user", "three"),))]
    questions = all_questions(loaded, prompts, BenchmarkOptions(max_new_tokens=3), Terminal())
    arguments = {"max_new_tokens": 3, "do_sample": False}
    outputs = [plain().run(loaded.model, question.input_ids, arguments) for question in questions]
    entry = Measured(plain(), [[outputs[0], None, outputs[2]], outputs])
    failed = Measured(plain(), error="no")
    (file,) = write_answers(tmp_path / "new", "sampled", loaded, "tiny", [entry, failed], questions)
    assert file.name == "sampled-plain.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [[choice["index"] for choice in record["choices"]] for record in records] == [[1], [0, 1]]
