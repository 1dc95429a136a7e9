"""evaluate: exits on text as a truncated model has them; tasks of lm-evaluation-harness on three sides."""

import copy
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer.command import main
from infer.evaluating.exit_only import ExitStages, generate_at_exit
from infer.evaluating.text import windows
from layerskip.checkpoint.settings import Setting, store_setting
from layerskip.checkpoint.vocabulary import store_draft_vocabulary
from layerskip.model.adapters import attach_adapters
from tests import tiny

TEXT = "def add(a, b):\n    return a + b\n\nthe quick brown fox jumps over the lazy dog\n" * 3
PAGE = Path(__file__).resolve().parents[1] / "docs" / "evaluate.md"
needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is an extra")


def evaluate(folder, capsys, *flags: str) -> tuple[str, dict]:
    """What is printed before the last line, and the last line."""
    assert main(["evaluate", str(folder), *map(str, flags)]) == 0
    shown, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return shown, json.loads(last)


def truncated(model, exit_layer: int, adapter=None):
    """A Llama of the first layers alone: transformers' own, with its adapter before the final norm."""
    model = copy.deepcopy(model)
    model._modules.pop("layerskip_adapters", None)
    model.model.layers = model.model.layers[:exit_layer]
    model.config.num_hidden_layers = exit_layer
    if adapter is not None:
        model.model.norm.register_forward_pre_hook(lambda module, args: (adapter(args[0]),))
    return model.eval()


def token_losses(model, ids: list[int], window: int, stride: int) -> list[float]:
    """Of every token but the first, one by one, each with the context that its window has."""
    losses = []
    for token in range(1, len(ids)):
        stop = window if token < window else min(len(ids), window + stride * math.ceil((token + 1 - window) / stride))
        context = torch.tensor([ids[max(0, stop - window) : token]])
        with torch.no_grad():
            losses.append(-model(context).logits[0, -1].log_softmax(-1)[ids[token]].item())
    return losses


@pytest.mark.parametrize(("length", "window", "stride"), [(1, 4, 2), (2, 4, 2), (9, 4, 1), (10, 4, 3), (30, 8, 7)])
def test_windows_count_every_token_but_the_first_once(length, window, stride):
    counted = []
    for start, stop, first in windows(length, window, stride):
        assert stop - start <= window
        assert first > start
        assert first == 1 or first - start >= window - stride
        counted += range(first, stop)
    assert counted == list(range(1, length))


def test_long_text_is_weighed_token_by_token(tiny_checkpoint, tokenizer, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()
    adapter = attach_adapters(model, [2], 4)["2"]
    torch.nn.init.normal_(adapter.up.weight)
    model.save_pretrained(tiny_checkpoint)
    paths = [tmp_path / "long.txt", tmp_path / "short.jsonl"]
    paths[0].write_text(TEXT)
    paths[1].write_text('{"text": "the lazy dog"}\n')
    _, result = evaluate(tiny_checkpoint, capsys, "--text", *paths, "--exits", "all", "--window", 32, "--stride", 12)
    texts = [tokenizer(text)["input_ids"] for text in (TEXT, "the lazy dog")]
    assert len(texts[0]) > 2 * 32 + 12
    assert [record["exit_layer"] for record in result["exits"]] == [1, 2, 3, 4]
    for record in result["exits"]:
        here = adapter if record["exit_layer"] == 2 else None
        assert record["adapter"] == (here is not None)
        reference = truncated(model, record["exit_layer"], here)
        losses = [loss for ids in texts for loss in token_losses(reference, ids, 32, 12)]
        assert record["num_tokens"] == len(losses) == result["conditions"]["num_tokens"]
        assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]), rel=1e-3)
    assert result["exits"][-1]["agreement"] == result["exits"][-1]["overlap"] == 1


def test_a_draft_vocabulary_is_measured_too_and_has_no_loss(tiny_checkpoint, tokenizer, capsys):
    store_draft_vocabulary(tiny_checkpoint, torch.arange(0, len(tokenizer), 100))
    shown, result = evaluate(tiny_checkpoint, capsys, "--exits", "2")
    whole, cut, model = result["exits"]
    assert [record["head"] for record in result["exits"]] == ["whole", "cut", "whole"]
    assert cut["loss"] is cut["perplexity"] is None
    assert cut["agreement"] <= whole["agreement"] < model["agreement"] == 1
    assert result["conditions"]["text"] == "built in"
    assert "4 (model)" in shown


def test_own_text_is_what_the_model_says(tiny_checkpoint, capsys, tmp_path):
    """A greedy continuation is the model's most probable text: its loss is below that of any other text."""
    flags = ("--num-prompts", 2, "--exits", "2")
    _, own = evaluate(tiny_checkpoint, capsys, "--own-text", "--max-new-tokens", 12, *flags)
    _, other = evaluate(tiny_checkpoint, capsys, *flags, "--json", tmp_path / "record.json")
    assert own["conditions"]["num_tokens"] == 24
    assert own["exits"][-1]["loss"] < other["exits"][-1]["loss"]
    assert json.loads((tmp_path / "record.json").read_text()) == other


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--window", "1"], "--window 1 predicts nothing: give 2 or more"),
        (["--window", "8", "--stride", "8"], "--stride 8 leaves tokens of a --window 8 without any context"),
        (["--own-text", "--max-tokens", "8"], "leave them out with --own-text"),
        (["--limit", "8"], "--limit goes with --tasks"),
        (["--text", "{tmp}/no.txt"], "cannot read --text {tmp}/no.txt"),
        (["--text", "{tmp}/no.txt", "--own-text"], "--text is read as it is, and --own-text is about prompts"),
        (["--exits", "9"], "exit_layer=9 is out of range"),
        (["--json", "{tmp}/nowhere/a.json"], "there is no folder {tmp}/nowhere"),
        (["--json", "{tmp}"], "--json {tmp} is a folder: name a file"),
    ],
)
def test_errors_come_before_the_weights_are_read(argv, said, tiny_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    code = main(["evaluate", str(tiny_checkpoint), *(part.format(tmp=tmp_path) for part in argv)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.format(tmp=tmp_path) in err


def test_windows_that_do_not_fit_and_a_missing_harness_are_told(tiny_checkpoint, capsys, monkeypatch):
    assert main(["evaluate", str(tiny_checkpoint), "--window", "300"]) == 2
    assert "--window 300 is more than the model's 256 positions: give 256 or less" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", str(tiny_checkpoint), "--tasks", "arc_easy"]) == 2
    assert "--tasks needs lm-evaluation-harness, which is not installed: pip install lm-eval" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_decoding_that_ends_at_an_exit_says_what_the_exit_says(name):
    """Token by token the exit's most probable one, in a batch with padding too."""
    model = tiny.architecture(name)
    stages = ExitStages(model, 2)
    rows = [torch.randint(3, 64, (n,)) for n in (9, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    output = generate_at_exit(
        stages, padded, attention_mask=(padded > 0).long(), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert torch.equal(output[:, :9], padded)
    for row, tokens in zip(rows, output[:, 9:], strict=True):
        text = row
        for token in tokens:
            assert token == stages.logits(text[None])[0, -1].argmax()
            text = torch.cat([text, token[None]])


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The folder of task files that docs/evaluate.md shows, found from the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tasks"
    folder.mkdir()
    blocks = re.findall(r"`tasks/([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    for name, content in blocks:
        (folder / name).write_text(content)
        if name.endswith(".yaml"):  # nothing is left in the user's cache
            with (folder / name).open("a") as file:
                data = f"data_files: {{test: {folder}/questions.jsonl}}, cache_dir: {tmp_path}/cache"
                print(f"dataset_kwargs: {{{data}}}", file=file)
    return folder


def harness_pairs(model, tokenizer, pairs) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation, and whether it is the greedy one, by the definition."""
    found = []
    for context, continuation in pairs:
        ids, start = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)  # (continuation, vocab)
        targets = torch.tensor(ids[start:])
        found.append((logits.gather(1, targets[:, None]).sum().item(), bool((logits.argmax(-1) == targets).all())))
    return found


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_harness_has_the_likelihoods_of_each_side(batch_size, tiny_checkpoint, tokenizer):
    from lm_eval.api.instance import Instance

    from infer.evaluating.sides import ExitSide, ModelSide
    from infer.loading import load
    from infer.options import ModelOptions

    loaded = load(ModelOptions(str(tiny_checkpoint), dtype="float32"))
    pairs = [("def add(a,", " b):"), ("the quick", " brown fox jumps"), ("the lazy", " dog"), ("the lazy", " fox")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for side, reference in [
        (ModelSide(loaded, batch_size), loaded.model),
        (ExitSide(loaded, batch_size, 2), truncated(loaded.model, 2)),
    ]:
        expected = harness_pairs(reference, tokenizer, pairs)
        for (value, greedy), (wanted, is_greedy) in zip(side.loglikelihood(requests, True), expected, strict=True):
            assert value == pytest.approx(wanted, abs=1e-3)
            assert greedy == is_greedy


@needs_harness
def test_each_side_samples_as_the_task_says(tiny_checkpoint):
    """From the most probable token alone that is greedy decoding; a stop string ends an answer."""
    from lm_eval.api.instance import Instance

    from infer.evaluating.sides import ExitSide, ModelSide, SelfSpeculativeSide
    from infer.loading import load
    from infer.options import ModelOptions

    loaded = load(ModelOptions(str(tiny_checkpoint), dtype="float32"))
    sides = (ModelSide(loaded, 2), SelfSpeculativeSide(loaded, 2, Setting(2, 3)), ExitSide(loaded, 2, 2))
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 1}
    answers = []
    for side in sides:
        for how in ({"do_sample": False}, sampling):
            until = {"until": [], "max_gen_toks": 12, **how}
            requests = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(("def add", "the"))]
            answers.append(side.generate_until(requests, True))
    plain, _, speculative, _, alone, _ = answers
    assert answers[::2] == answers[1::2]
    assert plain == speculative != alone
    stop = alone[0][4:6]
    until = {"until": [stop], "max_gen_toks": 12, "do_sample": False}
    request = Instance("generate_until", {}, ("def add", until), 0)
    assert sides[2].generate_until([request], True) == [alone[0][: alone[0].index(stop)]]


@needs_harness
def test_a_task_without_its_data_is_told(tiny_checkpoint, tasks, capsys):
    (tasks / "questions.jsonl").unlink()
    assert main(["evaluate", str(tiny_checkpoint), "--tasks", "capitals_choice", "--include-path", str(tasks)]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: --tasks capitals_choice cannot be loaded (")
    assert "give local ones with --include-path" in err


@needs_harness
@pytest.mark.slow
def test_the_tasks_of_the_page_on_three_sides(tiny_checkpoint, tasks, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting(2, 3))
    model.save_pretrained(tiny_checkpoint)
    flags = ("--tasks", "capitals_choice,capitals_written", "--include-path", tasks, "--dtype", "float32")
    shown, result = evaluate(tiny_checkpoint, capsys, *flags, "--batch-size", 4)
    plain, alone, speculative = result["tasks"]
    assert [side["side"] for side in result["tasks"]] == ["model", "exit 2", "self-speculative"]
    assert "exits" not in result
    metrics = {(record["task"], record["metric"]) for record in plain["results"]}
    assert metrics >= {("capitals_choice", "acc"), ("capitals_choice", "acc_norm"), ("capitals_written", "exact_match")}
    assert {record["task"] for record in speculative["results"]} == {"capitals_written"}
    assert all(record["stderr"] is not None for record in plain["results"])
    assert speculative["equal_answers"] == speculative["num_answers"] == alone["num_answers"] == 4
    assert alone["equal_answers"] < 4  # random layers disagree: nothing verified the exit's answers
    assert 1 <= speculative["mean_acceptance_length"] <= 4
    assert "as the model" in shown


@needs_harness
def test_a_task_nobody_knows_is_told(tiny_checkpoint, tasks, capsys, monkeypatch):
    from infer.evaluating import tasks as evaluation_tasks

    class OwnTasks(evaluation_tasks.TaskManager):
        """The folder's tasks alone: the harness takes seconds to read its own thousands."""

        def __init__(self, include_path, include_defaults=True):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(evaluation_tasks, "TaskManager", OwnTasks)
    assert main(["evaluate", str(tiny_checkpoint), "--tasks", "capital_choice", "--include-path", str(tasks)]) == 2
    assert (
        "--tasks capital_choice is no task of lm-evaluation-harness: did you mean capitals_choice?"
        in capsys.readouterr().err
    )
