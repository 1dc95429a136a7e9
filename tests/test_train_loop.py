"""Runs on a tiny model and text: exact resume, right accumulation, a checkpoint that others can load."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import get_token
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.runs import TINY, assert_same_weights, documents, metrics
from train.checkpoint import half_written, latest_checkpoint, read_progress
from train.command import load_config
from train.engine import accumulation_steps
from train.errors import ConfigError, TrainingError
from train.loop import train


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Overrides for forty short documents."""
    return [*documents(tmp_path_factory.mktemp("text") / "text.jsonl"), "every.log=1"]


@pytest.fixture
def run(text, tmp_path):
    """Train configs/tiny.yaml on `text` in a folder of the given name, with overrides; returns the folder."""

    def start(name: str, *overrides: str) -> Path:
        config = load_config(TINY, [*text, f"run.output_dir={tmp_path / name}", *overrides])
        assert train(config) == 0
        return tmp_path / name

    return start


def base_of(folder: Path) -> Path:
    """A copy of a finished run's checkpoint, to continue from."""
    base = folder.with_name("base")
    return shutil.copytree(folder, base, ignore=shutil.ignore_patterns("checkpoints", "data"))


def continuing(checkpoint: Path) -> tuple[str, ...]:
    """The overrides that make tiny.yaml continue a checkpoint."""
    return "model.architecture={}", f"model.name_or_path={checkpoint}", "tokenizer.train_vocab_size=null"


# A constant rate: the cosine of a run of five steps is not that of ten.
CONSTANT = ("optim.schedule=constant", "every.save=5", "model.architecture.attention_dropout=0.1")


def test_ten_steps_equal_five_saved_resumed_and_five(run):
    whole = run("whole", "optim.max_steps=10", *CONSTANT)
    halves = run("halves", "optim.max_steps=5", *CONSTANT)
    assert read_progress(latest_checkpoint(halves)).step == 5
    run("halves", "optim.max_steps=10", *CONSTANT)
    assert_same_weights(whole, halves)
    first, second = metrics(whole), metrics(halves)
    assert [record["step"] for record in second] == list(range(1, 11))
    assert [record["loss"] for record in first] == [record["loss"] for record in second]
    assert [record["tokens"] for record in first] == [record["tokens"] for record in second]
    optimizers = [torch.load(latest_checkpoint(folder) / "optimizer.pt") for folder in (whole, halves)]
    torch.testing.assert_close(optimizers[0]["state"], optimizers[1]["state"], rtol=0, atol=0)


def test_a_crash_between_checkpoints_repeats_the_lost_steps_exactly(run, capsys):
    whole = run("whole", "every.save=3")
    crashed = run("crashed", "every.save=3", "every.keep=9")
    # As if it had died in step 5, while it wrote a checkpoint.
    last = crashed / "checkpoints" / "step-000006"
    last.rename(last.with_name("step-000005.partial"))
    for path in crashed.glob("*.safetensors"):
        path.unlink()
    (crashed / "evaluation.json").write_text(json.dumps({"before": {}}))
    run("crashed", "every.save=3", "every.keep=9")
    assert f"ignored the half-written checkpoint {last.with_name('step-000005.partial')}" in capsys.readouterr().out
    assert_same_weights(whole, crashed)
    assert [record["step"] for record in metrics(crashed)] == [1, 2, 3, 4, 5, 6]
    assert not list((crashed / "checkpoints").glob("*.partial"))


def test_a_checkpoint_with_a_file_cut_short_is_ignored(run):
    folder = run("run")
    assert latest_checkpoint(folder).name == "step-000006"
    weights = folder / "checkpoints" / "step-000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert latest_checkpoint(folder).name == "step-000003"
    assert half_written(folder) == [folder / "checkpoints" / "step-000006"]


OWN = ("data.own_text=0.5", "data.own_text_rows=6", "optim.max_steps=6", "every.save=5", "optim.schedule=constant")


def test_the_last_steps_read_the_models_own_text(run):
    """Which is its greedy continuation of training text, and a resumed run reads the same."""
    whole = run("whole", *OWN)
    tokens = np.fromfile(whole / "data" / "own-000003.bin", dtype=np.uint16).reshape(6, 64)
    training = np.fromfile(whole / "data" / "train.bin", dtype=np.uint16)
    blocks = {tuple(block[:16]): tuple(block) for block in training[: len(training) // 64 * 64].reshape(-1, 64)}
    assert len({tuple(row[:16]) for row in tokens} & blocks.keys()) == 6
    assert not any(blocks[tuple(row[:16])] == tuple(row) for row in tokens)
    assert all(record["exits"] for record in metrics(whole))
    assert ["last" in record for record in metrics(whole)] == [True, True, True, False, True, False]

    broken = run("broken", *OWN)
    for path in (*broken.glob("*.safetensors"), broken / "evaluation.json"):
        path.unlink()
    shutil.rmtree(broken / "checkpoints" / "step-000006")
    (broken / "evaluation.json").write_text(json.dumps({"before": {}}))
    run("broken", *OWN)
    assert_same_weights(whole, broken)


def test_only_the_newest_checkpoints_are_kept(run):
    folder = run("run", "every.save=1", "every.keep=2")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000005", "step-000006"]


def test_same_seed_same_run_and_another_seed_another(run):
    first, second, other = run("a"), run("b"), run("c", "run.seed=1")
    assert_same_weights(first, second)
    assert metrics(first)[0]["loss"] != metrics(other)[0]["loss"]


def test_a_finished_run_is_left_as_it_is(run, capsys):
    folder = run("run")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    run("run")
    assert "is finished already" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


# Accumulation


def test_accumulated_gradients_equal_those_of_the_whole_batch(run):
    """Dropped rows and drawn positions belong to a sample's place in the step's batch, however that is cut up."""
    options = (
        "recipe.max_dropout=0.6",
        "recipe.exit_loss_positions=0.25",
        "optim.max_steps=3",
        "optim.warmup_steps=0",
        "recipe.self_distillation=0.5",
    )
    whole = run("whole", "optim.micro_batch_size=4", *options)
    parts = run("parts", "optim.micro_batch_size=1", *options)
    for a, b in zip(metrics(whole), metrics(parts), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["exits"] == pytest.approx(b["exits"], rel=1e-6)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-5)
    assert_same_weights(whole, parts, rtol=1e-4, atol=1e-5)


def test_loss_is_the_mean_over_tokens(run):
    folder = run("run", "optim.max_steps=2", "recipe.max_dropout=0")
    assert metrics(folder)[0]["last"] == pytest.approx(math.log(300), abs=0.1)  # an untrained model knows nothing


def test_a_batch_must_divide_over_the_processes():
    config = load_config(TINY)
    assert accumulation_steps(config, 2) == 1
    with pytest.raises(ConfigError, match=r"is 4; it must be a multiple of optim.micro_batch_size \(2\) times 3"):
        accumulation_steps(config, 3)


# The rotation


def test_losses_are_logged_for_the_exits_of_each_step(run):
    records = metrics(run("run"))
    assert [list(record["exits"]) for record in records] == [["1"], ["2"], ["1"], ["2"], ["1"], ["2"]]
    assert all("last" in record for record in records)


def test_a_line_of_metrics_is_the_mean_since_the_last(run):
    every, third = metrics(run("a")), metrics(run("b", "every.log=3"))
    assert [record["step"] for record in third] == [3, 6]
    assert third[0]["loss"] == pytest.approx(sum(record["loss"] for record in every[:3]) / 3)
    assert third[0]["exits"]["1"] == pytest.approx((every[0]["exits"]["1"] + every[2]["exits"]["1"]) / 2)


# Stopping for a reason


@pytest.mark.parametrize(("rate", "what"), [("1e38", "loss"), ("1e30", "gradient norm")])
def test_what_is_not_finite_stops_before_the_step(run, tmp_path, rate, what):
    with pytest.raises(TrainingError) as caught:
        run("run", f"optim.learning_rate={rate}", "optim.warmup_steps=0", "every.save=1")
    message = str(caught.value)
    assert message.startswith(f"the {what} is nan in step 2; the step was not taken; the last checkpoint is ")
    assert f"with a lower optim.learning_rate (now {float(rate):g})" in message
    assert "\n" not in message
    assert latest_checkpoint(tmp_path / "run").name == "step-000001"  # the last good one


# What does not fit


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sequence_length=512", r"data.sequence_length is 512; the model has 256 positions"),
        ("recipe.exits=[4]", "recipe: exits has 4, but this model has 4 layers"),
        (
            "model.architecture.vocab_size=100",
            r"the tokenizer has \d+ tokens, the model's embedding 100: leave out model.architecture.vocab_size",
        ),
        (
            "model.architecture.hiden_size=3",
            "unknown key model.architecture.hiden_size for model_type llama; did you mean",
        ),
        ("model.architecture.model_type=lama", "transformers has no such family; did you mean llama"),
        ("model.architecture={model_type: t5}", "the model is a t5, no decoder-only causal LM: only those can draft"),
        ("model.architecture.model_type=t5", "the model is a t5, no decoder-only causal LM: only those can draft"),
        ("model.architecture.model_type=5", "model.architecture.model_type is '5'; transformers has no such family"),
        ("model.architecture.hidden_size=-48", "model.architecture does not fit llama: .* negative dimension -48"),
        ("model.architecture.hidden_act=gelluu", "model.architecture does not fit llama: 'gelluu' is unknown"),
        ("model.architecture.num_key_value_heads=3", r"num_key_value_heads is 3; it must divide .*heads \(4\)"),
        ("model.attn_implementation=quick", "model.attn_implementation is 'quick': .* is not supported"),
        ("model.architecture={model_type: mamba}", "the model is a mamba, which .* keeps a recurrent state"),
        ("model.architecture.num_hidden_layers=1", "the model's num_hidden_layers is 1; an exit needs"),
    ],
)
def test_settings_that_do_not_fit_the_model(run, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        run("run", override)
    assert not (tmp_path / "run" / "data" / "manifest.json").exists() or "tokenizer" in message  # before the text


def test_samples_end_at_the_models_last_position(run):
    # GPT-2 learns a vector for each position: it cannot be asked for one beyond the last.
    small = "model.architecture={model_type: gpt2, n_embd: 32, n_layer: 4, n_head: 4, n_positions: 128}"
    folder = run("run", small, "recipe.exits=[1]", "tracking.sample_tokens=120", "optim.max_steps=2")
    assert (folder / "samples.jsonl").read_text().count("continuation")


def test_three_documents_are_enough_and_a_resume_reads_what_the_run_began_with(run, tmp_path, capsys):
    # By their hashes all three would be trained on.
    options = ["data.max_documents=3", "data.held_out=0.001", "every.save=1", "tracking.samples=0"]
    folder = run("run", *options, "optim.max_steps=2")
    assert "one was moved to validation and one to test" in " ".join(capsys.readouterr().out.split())
    before = {path.name: path.read_bytes() for path in (folder / "data").iterdir()}
    assert all(len(before[f"{split}.bin"]) >= 2 * 64 for split in ("train", "validation", "test"))
    run("run", *options, "optim.max_steps=3")
    assert {path.name: path.read_bytes() for path in (folder / "data").iterdir()} == before
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3]


def test_two_documents_are_too_few(run, tmp_path):
    (tmp_path / "two.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "two"}\n')
    with pytest.raises(TrainingError, match=r"no text for .*: training, validation and test need a document each"):
        run("run", f"data.path={tmp_path / 'two.jsonl'}")


def test_a_model_that_is_not_there(run, tmp_path):
    with pytest.raises(TrainingError, match=r"cannot load model\.name_or_path '.*/absent': there is no such folder$"):
        run("run", *continuing(tmp_path / "absent"))
    with pytest.raises(TrainingError, match="'runs/absent': there is no such folder, and as a Hub id: "):
        run("run", *continuing(Path("runs/absent")))


def test_an_upload_that_could_not_succeed_is_told_before_the_training(run):
    if get_token() is not None:
        pytest.skip("there is a token")
    with pytest.raises(ConfigError, match=r"hub\.repo is set, but there is no token"):
        run("run", "hub.repo=owner/name")
    with pytest.raises(ConfigError, match=r"hub\.repo: .* names no repository"):
        run("run", "hub.repo=own er/name")


# The finished checkpoint


def test_finished_checkpoint_is_an_ordinary_one(run):
    folder = run("run")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer("def value", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, ids.shape[1] + 3)
    last = folder / "checkpoints" / "step-000006"
    assert_same_weights(folder, last)
    for place in (folder, last):  # where it comes from lies beside the weights
        provenance = json.loads((place / "provenance.json").read_text())
        assert provenance["data"].keys() >= {"data/train.bin", "data/validation.bin", "data/test.bin"}
        assert load_config(place / "config.yaml").run.output_dir == str(folder)
    assert "## Exits" in (folder / "README.md").read_text()


def test_setting_and_numbers_travel_in_the_checkpoint_and_survive_a_round_trip(run, tmp_path):
    folder = run("run")
    record = json.loads((folder / "evaluation.json").read_text())
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "copy")
    for place in (folder, tmp_path / "copy"):
        setting = GenerationConfig.from_pretrained(place).layerskip
        assert setting == {name: record["setting"][name] for name in ("exit_layer", "num_draft_tokens")}
        carried = json.loads((place / "config.json").read_text())["layerskip"]
        assert carried["recipe"]["exits"] == [1, 2]
        assert carried["exits"].keys() == {"1", "2"}
        for exit_layer, numbers in carried["exits"].items():
            measured = record["after"]["test"]["exits"][exit_layer]
            assert numbers == {name: measured[name] for name in ("loss", "agreement", "overlap")}


def test_setting_is_chosen_on_validation_and_reported_on_test(run):
    folder = run("run")
    record = json.loads((folder / "evaluation.json").read_text())
    setting = record["setting"]
    assert setting["exit_layer"] in (1, 2)
    assert 1 <= setting["num_draft_tokens"] <= 8
    assert setting["forecast"]["mean_acceptance_length"] <= setting["num_draft_tokens"] + 1
    assert setting["chosen_on"] == "validation"
    carried = json.loads((folder / "generation_config.json").read_text())["layerskip"]
    assert carried == {name: setting[name] for name in ("exit_layer", "num_draft_tokens")}
    assert record["before"]["test"]["last"]["loss"] > record["after"]["test"]["last"]["loss"]
    assert (record["steps"], record["tokens"]) == (6, 6 * 4 * 64)


def test_evaluations_are_logged_when_due(run):
    folder = run("run", "every.evaluate=2")
    assert [record["step"] for record in metrics(folder, "validation")] == [0, 2, 4, 6]
    assert [record["step"] for record in metrics(folder, "test")] == [0, 6]


def test_bfloat16_may_be_saved(run):
    folder = run("run", "model.save_dtype=bfloat16", "model.dtype=bfloat16")
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_continuing_a_checkpoint_begins_with_its_weights(run):
    first = run("first")
    second = run("second", *continuing(base_of(first)))
    after, before = (json.loads((f / "evaluation.json").read_text()) for f in (first, second))
    assert before["before"]["test"]["last"] == after["after"]["test"]["last"]


def test_gradient_checkpointing_changes_memory_not_the_run(run):
    plain = run("plain", "optim.max_steps=3")
    recomputed = run("recomputed", "optim.max_steps=3", "model.gradient_checkpointing=true")
    assert_same_weights(plain, recomputed, rtol=1e-5, atol=1e-6)


def test_prompts_of_held_out_text_lie_beside_the_run(run):
    folder = run("run")
    for split in ("validation", "test"):
        lines = (folder / "prompts" / f"{split}.jsonl").read_text().splitlines()
        assert lines
        assert all(json.loads(line).keys() == {"prompt"} for line in lines)
