"""Every recipe by name through the whole program, and what a frozen target promises there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import layerskip
from layerskip.presets import PRESETS
from layerskip.recipe import Recipe
from train.command import load_config
from train.errors import ConfigError, TrainingError
from train.loop import train

TINY = Path(__file__).resolve().parents[1] / "configs" / "tiny.yaml"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = ["def", "return", "class", "value", "index", "self", "import", "raise", "yield", "lambda"]
    lines = [json.dumps({"text": " ".join(np.random.default_rng(i).choice(words, 200))}) for i in range(40)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def start(text, tmp_path_factory):
    """Train configs/tiny.yaml on `text` for some steps; returns the run's folder."""

    def run(*overrides: str, folder: Path | None = None) -> Path:
        folder = folder or tmp_path_factory.mktemp("run")
        source = ["data.standard_library=false", "data.max_documents=null", f"data.path={text}", "data.own_text=0"]
        source += ["tokenizer.train_vocab_size=300", "data.evaluation_blocks=1", "optim.max_steps=3"]
        source += ["optim.warmup_steps=0", "every.log=1"]
        config = load_config(TINY, [*source, f"run.output_dir={folder}", *overrides])
        assert train(config) == 0
        return folder

    return run


@pytest.fixture(scope="module")
def original(start) -> Path:
    return start("recipe.max_dropout=0")


def test_presets_are_read_below_the_sections_own_values(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {name_or_path: x}\ndata: {path: [x]}\nrecipe: {preset: paper-finetune-task, max_dropout: 0.3}"
    )
    recipe = load_config(path, ["recipe.seed=5"]).recipe
    assert recipe == Recipe.preset("paper-finetune-task", max_dropout=0.3, seed=5, total_steps=1000)
    assert load_config(path, ["recipe.preset=null"]).recipe == Recipe(max_dropout=0.3, total_steps=1000)
    with pytest.raises(ConfigError, match="did you mean paper-finetune"):
        load_config(path, ["recipe.preset=paper-finetun"])


@pytest.mark.parametrize("name", ["paper-scratch", "dont-drop-dropout", "self-distill"])
def test_presets_train(start, tmp_path, name):
    config = tmp_path / "config.yaml"
    values = TINY.read_text()
    head, _, tail = values.partition("recipe:")
    rest = tail[tail.index("\n\n") :]
    config.write_text(f"{head}recipe: {{preset: {name}}}{rest}")
    assert load_config(config).recipe == Recipe.preset(name, total_steps=load_config(config).optim.max_steps)
    folder = start(*[f"recipe.{key}={json.dumps(value)}" for key, value in PRESETS[name].items()])
    after = json.loads((folder / "evaluation.json").read_text())["after"]["test"]
    assert all(0 < numbers["loss"] < 20 for numbers in [after["last"], *after["exits"].values()])


def test_a_frozen_target_stays_bit_for_bit_and_its_adapters_travel(start, original):
    arguments = [f"recipe.{key}={json.dumps(value)}" for key, value in PRESETS["frozen-target"].items()]
    arguments += ["model.architecture=null", f"model.name_or_path={original}", "tokenizer.train_vocab_size=null"]
    folder = start(*arguments, "recipe.adapter_rank=4", "recipe.exits=[1]", "every.save=2", "optim.learning_rate=1e-2")
    before, after = load_file(original / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapter = layerskip.adapters.adapter_at(model, 1)
    assert adapter.up.weight.any()
    ids = torch.arange(3, 9)[None]
    plain = model.generate(ids, do_sample=False, max_new_tokens=20)
    assert torch.equal(layerskip.generate(model, ids, exit_layer=1, do_sample=False, max_new_tokens=20), plain)

    further = ["model.architecture=null", f"model.name_or_path={folder}", "tokenizer.train_vocab_size=null"]
    assert "adapters" not in json.loads((start(*further) / "config.json").read_text())["layerskip"]
    other = start(*arguments, f"model.name_or_path={folder}", "recipe.adapter_rank=2", "recipe.exits=[2]")
    assert load_file(other / "exit_adapters.safetensors").keys() == {"2.down.weight", "2.up.weight"}

    arguments += ["recipe.adapter_rank=4", "recipe.exits=[1]", "every.save=2", "recipe.total_steps=3"]
    arguments += ["optim.learning_rate=1e-2", "optim.schedule=constant"]
    stopped = start(*arguments, "optim.max_steps=2")
    resumed, whole = start(*arguments, folder=stopped), start(*arguments)
    one = load_file(resumed / "exit_adapters.safetensors")
    other = load_file(whole / "exit_adapters.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_frozen_targets_lost_adapters_are_said_in_one_line(start, original, tmp_path):
    folder = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(original).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["layerskip"]["adapters"] = {"rank": 4, "exits": [1]}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [f"recipe.{key}={json.dumps(value)}" for key, value in PRESETS["frozen-target"].items()]
    arguments += ["model.architecture=null", f"model.name_or_path={folder}", f"tokenizer.name_or_path={original}"]
    arguments += ["tokenizer.train_vocab_size=null", "recipe.exits=[1]"]
    with pytest.raises(TrainingError, match=r"there is no exit_adapters\.safetensors beside its weights"):
        start(*arguments, "recipe.adapter_rank=4")
    start(*arguments, "recipe.adapter_rank=3")  # others were asked for: the lost ones are not missed


def test_the_guard_is_reported_and_holds(start, original):
    arguments = ["model.architecture=null", f"model.name_or_path={original}", "tokenizer.train_vocab_size=null"]
    losses = []
    for weight in (0.0, 30.0):
        folder = start(*arguments, f"recipe.reference_weight={weight}", "optim.learning_rate=3e-3")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([r for r in records if r["kind"] == "train"])
    assert all("reference" not in record for record in losses[0])
    assert losses[1][0]["reference"] == pytest.approx(0, abs=1e-2)
    assert all(record["reference"] >= -1e-3 for record in losses[1])
