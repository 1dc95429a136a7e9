"""Every recipe by name through the whole program, and what a frozen target promises there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import layerskip
from layerskip.training.presets import PRESETS, preset_values
from layerskip.training.recipe import Recipe
from tests.runs import TINY
from train.command import load_config
from train.errors import ConfigError, TrainingError

LOW_RANK = preset_values("frozen-target", {"adapter_rank": 4})


@pytest.fixture(scope="module")
def original(train_tiny) -> Path:
    return train_tiny("recipe.max_dropout=0")


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


def test_a_preset_on_the_command_line_takes_the_place_of_the_files_recipe():
    quickstart = TINY.with_name("quickstart.yaml")  # its recipe drops layers, which a frozen model cannot
    settings = ["recipe.preset=frozen-target", "recipe.exits=[3]"]
    assert load_config(quickstart, settings).recipe == Recipe.preset("frozen-target", exits=(3,), total_steps=500)


@pytest.mark.parametrize("name", ["paper-scratch", "dont-drop-dropout", "self-distill"])
def test_presets_train(train_tiny, tmp_path, name):
    config = tmp_path / "config.yaml"
    values = TINY.read_text()
    head, _, tail = values.partition("recipe:")
    rest = tail[tail.index("\n\n") :]
    config.write_text(f"{head}recipe: {{preset: {name}}}{rest}")
    assert load_config(config).recipe == Recipe.preset(name, total_steps=load_config(config).optim.max_steps)
    folder = train_tiny(*[f"recipe.{key}={json.dumps(value)}" for key, value in PRESETS[name].items()])
    after = json.loads((folder / "evaluation.json").read_text())["after"]["test"]
    assert all(0 < numbers["loss"] < 20 for numbers in [after["last"], *after["exits"].values()])


def test_a_frozen_target_stays_bit_for_bit_and_its_adapters_travel(train_tiny, original):
    arguments = [
        f"recipe.{key}={json.dumps(value)}"
        for key, value in preset_values("frozen-target", {"adapter_rank": 4}).items()
    ]
    arguments += ["model.architecture=null", f"model.name_or_path={original}", "tokenizer.train_vocab_size=null"]
    folder = train_tiny(*arguments, "recipe.exits=[1]", "every.save=2", "optim.learning_rate=1e-2")
    before, after = load_file(original / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapter = layerskip.model.adapters.adapter_at(model, 1)
    assert adapter.up.weight.any()
    ids = torch.arange(3, 9)[None]
    plain = model.generate(ids, do_sample=False, max_new_tokens=20)
    assert torch.equal(layerskip.generate(model, ids, exit_layer=1, do_sample=False, max_new_tokens=20), plain)

    further = ["model.architecture=null", f"model.name_or_path={folder}", "tokenizer.train_vocab_size=null"]
    assert "adapters" not in json.loads((train_tiny(*further) / "config.json").read_text())["layerskip"]
    other = train_tiny(*arguments, f"model.name_or_path={folder}", "recipe.adapter_rank=2", "recipe.exits=[2]")
    assert load_file(other / "exit_adapters.safetensors").keys() == {"2.down.weight", "2.up.weight"}

    arguments += ["recipe.exits=[1]", "every.save=2", "recipe.total_steps=3"]
    arguments += ["optim.learning_rate=1e-2", "optim.schedule=constant"]
    stopped = train_tiny(*arguments, "optim.max_steps=2")
    resumed, whole = train_tiny(*arguments, folder=stopped), train_tiny(*arguments)
    one = load_file(resumed / "exit_adapters.safetensors")
    other = load_file(whole / "exit_adapters.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_frozen_targets_lost_adapters_are_said_in_one_line(train_tiny, original, tmp_path):
    folder = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(original).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["layerskip"]["adapters"] = {"rank": 4, "exits": [1]}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [
        f"recipe.{key}={json.dumps(value)}"
        for key, value in preset_values("frozen-target", {"adapter_rank": 4}).items()
    ]
    arguments += ["model.architecture=null", f"model.name_or_path={folder}", f"tokenizer.name_or_path={original}"]
    arguments += ["tokenizer.train_vocab_size=null", "recipe.exits=[1]"]
    with pytest.raises(TrainingError, match=r"there is no exit_adapters\.safetensors beside its weights"):
        train_tiny(*arguments)
    train_tiny(*arguments, "recipe.adapter_rank=3")  # others were asked for: the lost ones are not missed


def test_the_guard_is_reported_and_holds(train_tiny, original):
    arguments = ["model.architecture=null", f"model.name_or_path={original}", "tokenizer.train_vocab_size=null"]
    arguments += ["every.log=1"]
    losses = []
    for weight in (0.0, 30.0):
        folder = train_tiny(*arguments, f"recipe.reference_weight={weight}", "optim.learning_rate=3e-3")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([r for r in records if r["kind"] == "train"])
    assert all("reference" not in record for record in losses[0])
    assert losses[1][0]["reference"] == pytest.approx(0, abs=1e-2)
    assert all(record["reference"] >= -1e-3 for record in losses[1])
