"""The model answers prompts itself: in batches as alone, with a seed a row, and the same file after any stop."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests import tiny
from tests.runs import ROOT
from tests.test_train_chat import CHATML, FIRST, SECOND, SYSTEM
from train.answers import Answers
from train.bad_rows import BadRows
from train.command import load_config, main
from train.continuations import RowNoise, Sampling, continue_prompts, cut_after
from train.corpus import read_documents
from train.errors import TrainingError
from train.regenerate import fingerprint
from train.regenerate_options import RegenerateOptions, parser
from train.text_config import DataConfig

TEXTS = [f"def add{i}(a, b): return a + b{' over the lazy dog' * (i % 4)}" for i in range(13)]


@pytest.fixture
def files(tmp_path, tiny_checkpoint) -> Path:
    """A folder with a config, texts, conversations and a checkpoint whose tokenizer speaks ChatML."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<eos>").replace("<|im_start|>", "")
    tokenizer.save_pretrained(tiny_checkpoint)
    # As instruct checkpoints have it: what the command says must win over this.
    GenerationConfig(do_sample=True, temperature=0.3, top_k=3, eos_token_id=[2], pad_token_id=0).save_pretrained(
        tiny_checkpoint
    )
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    chats = [FIRST, [SYSTEM, *FIRST, *SECOND], [FIRST[0]], [SYSTEM]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "config.yaml").write_text(
        f"model: {{name_or_path: {tiny_checkpoint}, dtype: float32}}\ndata: {{path: {tmp_path}/texts.jsonl}}\n"
    )
    return tmp_path


def regenerate(files: Path, name: str, *arguments: str) -> list[dict]:
    """Run the command; returns the rows of the file it wrote."""
    output = files / name
    options = ["--output", str(output), "--max-new-tokens", "12", "--batch-size", "4", *arguments]
    assert main(["regenerate", str(files / "config.yaml"), *options]) == 0
    assert sorted(path.name for path in files.glob(f"{name}*")) == [name]  # nothing is left beside it
    return [json.loads(line) for line in output.read_text().splitlines()]


# What is written


def test_texts_go_on_as_generate_goes_on(files, tiny_checkpoint):
    rows = regenerate(files, "out.jsonl", "--prompt-tokens", "4")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_checkpoint),
        AutoTokenizer.from_pretrained(tiny_checkpoint),
    )
    expected = []
    for text in TEXTS:  # in the order of the source
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :4]
        alone = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=0)
        prompt, whole = (
            tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd") for tokens in (ids[0], alone[0])
        )
        if len(whole) > len(prompt):  # else nothing was said, and the row is left out
            expected.append({"text": whole, "prompt": prompt, "completion": whole[len(prompt) :], "group": text})
    assert len(expected) > 8
    assert rows == expected


def test_a_sampled_row_depends_on_its_seed_alone(files):
    sampled = regenerate(files, "a.jsonl", "--temperature", "1")
    assert regenerate(files, "b.jsonl", "--temperature", "1", "--batch-size", "1") == sampled
    parts = [regenerate(files, f"p{k}.jsonl", "--temperature", "1", "--part", f"{k}/2") for k in (0, 1)]
    assert parts == [sampled[0::2], sampled[1::2]]
    assert regenerate(files, "c.jsonl", "--temperature", "1", "run.seed=1") != sampled
    assert regenerate(files, "d.jsonl") != sampled


CHAT = ("data.messages_column=messages", "--keep-unfinished")


def test_conversations_get_a_new_last_answer_that_training_reads(files, capsys):
    rows = regenerate(files, "out.jsonl", f"data.path={files}/chats.jsonl", *CHAT)
    assert [[m["content"] for m in row["messages"][:-1]] for row in rows] == [
        [FIRST[0]["content"]],
        [SYSTEM["content"], FIRST[0]["content"], FIRST[1]["content"], SECOND[0]["content"]],
        [FIRST[0]["content"]],
        [SYSTEM["content"]],
    ]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert rows[0]["messages"] == rows[2]["messages"]  # the same prompt, asked or answered before
    assert f"train on it with: data.path={files}/out.jsonl data.messages_column=messages" in capsys.readouterr().out
    settings = {"messages_column": "messages", "group_column": "group"}
    again = list(read_documents(DataConfig(path=(f"{files}/out.jsonl",), **settings), 0.3, BadRows(0)))
    assert [document.messages[-1]["content"] for document in again] == [row["messages"][-1]["content"] for row in rows]
    before = list(
        read_documents(DataConfig(path=(f"{files}/chats.jsonl",), messages_column="messages"), 0.3, BadRows(2))
    )
    # A prompt that is held out stays held out when its answer is another.
    assert [d.split for d in before] == [d.split for d in again[:2]]


def test_prompts_alone_and_answers_without_an_end(files, capsys):
    (files / "prompts.jsonl").write_text('{"q": "2 + 2?"}\n{"q": "3 + 3?"}\n')
    source = (f"data.path={files}/prompts.jsonl", "data.prompt_column=q")
    rows = regenerate(files, "out.jsonl", *source, "--keep-unfinished")
    assert [row["messages"][0] for row in rows] == [{"role": "user", "content": q} for q in ("2 + 2?", "3 + 3?")]
    arguments = ["--output", f"{files}/none.jsonl", "--max-new-tokens", "1", *source]
    assert main(["regenerate", f"{files}/config.yaml", *arguments]) == 1
    assert "no answer is left to write; left out: 2 unfinished (raise --max-new-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("advice", [["--keep-unfinished"], ["--max-new-tokens", "12", "--keep-unfinished"]])
def test_what_is_advised_where_no_answer_is_finished_works(files, capsys, monkeypatch, advice):
    (files / "prompts.jsonl").write_text('{"q": "2 + 2?"}\n{"q": "3 + 3?"}\n')
    options = [f"data.path={files}/prompts.jsonl", "data.prompt_column=q", "--max-new-tokens", "4", "--batch-size", "4"]
    assert main(["regenerate", f"{files}/config.yaml", "--output", f"{files}/a.jsonl", *options]) == 1
    assert "no answer is left to write; left out: 2 unfinished" in capsys.readouterr().err
    fresh = regenerate(files, "fresh.jsonl", *options, *advice)
    assert len(fresh) == 2
    asked = []
    monkeypatch.setattr("train.continuations.continue_prompts", lambda *a: asked.append(a) or continue_prompts(*a))
    assert regenerate(files, "a.jsonl", *options, *advice) == fresh
    assert bool(asked) == ("--max-new-tokens" in advice)  # else what was written is kept, not written again


def test_answers_that_are_finished_are_not_thrown_away_for_other_settings(tmp_path):
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    with Answers(path, {"--max-new-tokens": 4}) as answers:
        answers.add(0, {"text": "a"}, "unfinished")
        answers.add(1, {"text": "b"})
    before = partial.read_bytes()
    with pytest.raises(TrainingError, match=r"was begun with --max-new-tokens 4, here it is 8: go on with the same"):
        Answers(path, {"--max-new-tokens": 8})
    assert partial.read_bytes() == before
    with Answers(path, {"--max-new-tokens": 4}, keep_unfinished=True) as answers:
        assert answers.finish() == (2, "")
    assert path.read_text() == '{"text": "a"}\n{"text": "b"}\n'


ASSISTANT = ROOT / "configs" / "assistant.yaml"


@pytest.mark.slow
def test_the_example_of_an_assistant_regenerates_and_trains(files, tiny_checkpoint, monkeypatch):
    """configs/assistant.yaml by its own two commands, on a tiny model, beside files of the names it has."""
    monkeypatch.chdir(files)
    (files / "docs").mkdir()
    for name in "abcdefgh":
        (files / "docs" / f"{name}.md").write_text(f"{name} the quick brown fox " * 30)
    lines = [json.dumps({"messages": [{"role": "user", "content": f"{i} + 2?"}]}) for i in range(30)]
    (files / "prompts.jsonl").write_text("\n".join(lines))
    tiny_model = (f"model.name_or_path={tiny_checkpoint}", "model.dtype=float32", "run.cpu_threads=1")
    prompts = "data.sources=[{path: prompts.jsonl, messages_column: messages}]"
    command = ["regenerate", str(ASSISTANT), prompts, "--output", "answers.jsonl", "--max-new-tokens", "12"]
    assert main([*command, *tiny_model, "--keep-unfinished"]) == 0
    small = ("data.sequence_length=64", "data.held_out=0.2", "recipe.exits=[1, 2]", "optim.warmup_steps=0")
    assert main([str(ASSISTANT), *tiny_model, *small, "optim.max_steps=1", "data.evaluation_blocks=2"]) == 0
    record = json.loads((files / "runs" / "assistant" / "evaluation.json").read_text())
    assert record["steps"] == 1


# Stopping


def test_a_stopped_command_goes_on_and_the_file_is_the_same(files):
    """Wherever it stopped: between two batches, within one, within a line."""
    whole = regenerate(files, "whole.jsonl", "--temperature", "1")
    final = (files / "whole.jsonl").read_bytes()
    _begin(files)
    lines = (files / "out.jsonl.partial").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1
    rows = [json.dumps({"row": i, "record": row}).encode() + b"\n" for i, row in enumerate(whole)]
    for there in (b"", rows[12] + rows[3], b"".join(rows[:9]) + rows[9][:-5], b"".join(rows)):
        (files / "out.jsonl.partial").write_bytes(lines[0] + there)
        (files / "out.jsonl").unlink(missing_ok=True)
        assert regenerate(files, "out.jsonl", "--temperature", "1") == whole
        assert (files / "out.jsonl").read_bytes() == final


def _begin(files: Path) -> None:
    """Leave what the command has written before the model's first word."""
    options = ["--output", f"{files}/out.jsonl", "--max-new-tokens", "12", "--batch-size", "4", "--temperature", "1"]
    arguments = parser().parse_intermixed_args([f"{files}/config.yaml", *options])
    settings = RegenerateOptions(**{f.name: getattr(arguments, f.name) for f in fields(RegenerateOptions)})
    with Answers(settings.output, fingerprint(settings, load_config(arguments.config))):
        pass


@pytest.mark.slow
def test_a_killed_command_goes_on_and_the_file_is_the_same(files):
    options = ["--temperature", "1", "--batch-size", "1"]
    command = [sys.executable, "-m", "tests.killed_run", "answer:3", "regenerate", f"{files}/config.yaml", *options]
    command += ["--output", f"{files}/out.jsonl", "--max-new-tokens", "12"]
    killed = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (files / "out.jsonl.partial").read_bytes().count(b"\n") == 1 + 3  # the settings, and three answers
    resumed = regenerate(files, "out.jsonl", *options)
    assert resumed == regenerate(files, "whole.jsonl", *options)


def test_other_settings_do_not_go_on_with_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with Answers(path, {"--top-p": 0.9}) as answers:
        answers.add(1, {"text": "b"})
    with pytest.raises(TrainingError, match=r"was begun with --top-p 0\.9, here it is 0\.8: go on with the same"):
        Answers(path, {"--top-p": 0.8})
    with Answers(path, {"--top-p": 0.9}) as answers:
        assert 1 in answers
        answers.add(0, {"text": "a"})
        answers.add(2, None, "empty")
        assert answers.finish() == (2, "1 empty")
    assert path.read_text() == '{"text": "a"}\n{"text": "b"}\n'


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature is -1.0; it must be at least 0 (greedy)"),
        (["--temperature", "inf"], "--temperature is inf; it must be at least 0 (greedy) and finite"),
        (["--part", "2/2"], "--part is '2/2'; write K/N with K from 0 to N-1"),
        (["--output", "a.txt"], "--output is a.txt; it must end in .jsonl"),
        (["--max-new-tokens", "256"], "--max-new-tokens is 256; the model has 256 positions, prompt included"),
        (
            ["model.name_or_path=null", "model.architecture={model_type: llama}", "tokenizer.name_or_path=x"],
            "regenerate needs a trained model: give model.name_or_path; runs/config holds none yet",
        ),
        (["data.prompt_column=q", "--max-new-tokens", "9"], "data.prompt_column is 'q'; "),
    ],
)
def test_mistakes_are_one_line(files, capsys, arguments, message):
    assert main(["regenerate", f"{files}/config.yaml", "--output", f"{files}/o.jsonl", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_prompts_that_leave_no_room_are_bad_rows(files, capsys):
    lines = [{"messages": [{"role": "user", "content": text}]} for text in ("x y " * 200, "short")]
    (files / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(regenerate(files, "out.jsonl", f"data.path={files}/chats.jsonl", *CHAT)) == 1
    assert "chats.jsonl:1 has a prompt of " in capsys.readouterr().out


# Continuations


def test_padding_changes_nothing():
    model = tiny.llama()
    prompts = [torch.randint(3, 64, (length,)) for length in (3, 9, 5)]
    together = continue_prompts(model, prompts, 10, padding=0)
    assert [text.tolist() for text in together] == [
        continue_prompts(model, [prompt], 10, padding=0)[0].tolist() for prompt in prompts
    ]
    assert not model.training


@pytest.mark.parametrize(("ends", "length"), [([5], 4), ([9, 7], 2), ([], 6), ([1], 6)])
def test_a_continuation_is_cut_after_its_end(ends, length):
    assert cut_after(torch.tensor([2, 7, 3, 5, 5, 9]), ends).tolist() == [2, 7, 3, 5, 5, 9][:length]


def test_noise_makes_the_greatest_a_sample_of_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -float("inf")])
    expected = logits.softmax(-1)
    rows = 20_000
    drawn = RowNoise(range(rows))(torch.empty(rows, 0), logits.expand(rows, -1)).argmax(-1)
    counts = torch.bincount(drawn, minlength=5).double()
    assert counts[4] == 0
    chi_square = ((counts[:4] - rows * expected[:4]) ** 2 / (rows * expected[:4])).sum()
    assert chi_square < 16.3  # 3 degrees of freedom: one in a thousand
    assert ((counts[:4] - rows / 4) ** 2 / (rows / 4)).sum() > 1000  # and not of any other


def test_sampling_keeps_to_its_limits():
    model, prompt = tiny.llama(), torch.randint(3, 64, (6,))
    greedy = continue_prompts(model, [prompt], 12, padding=0)[0]
    for narrow in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-5)):
        assert continue_prompts(model, [prompt], 12, 0, seeds=[3], sampling=narrow)[0].tolist() == greedy.tolist()
    wide = [continue_prompts(model, [prompt], 12, 0, seeds=[s], sampling=Sampling())[0].tolist() for s in range(3)]
    assert len({tuple(text) for text in wide}) == 3
