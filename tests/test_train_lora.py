"""LoRA through the whole program: ordinary merged checkpoints, exact resume, and the original behind the guard."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import tiny
from train.command import load_config
from train.errors import ConfigError
from train.lora import add_lora, merge_lora
from train.model_config import ModelConfig

pytest.importorskip("peft")
LORA = ["model.architecture=null", "tokenizer.train_vocab_size=null", "model.lora_rank=4", "optim.learning_rate=1e-2"]
LORA += ["recipe.reference_weight=0.1", "every.save=2", "optim.schedule=constant", "recipe.total_steps=4"]


@pytest.fixture(scope="module")
def original(train_tiny) -> Path:
    return train_tiny("optim.max_steps=1")


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt-projected", "mixtral"])
def test_merged_weights_compute_what_the_update_beside_them_does(name):
    model = tiny.architecture(name)
    plain = tiny.architecture(name)
    add_lora(model, ModelConfig(name_or_path="x", lora_rank=3), 0, None)
    assert [n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n] == []
    for n, p in model.named_parameters():
        if ".lora_B." in n:
            torch.nn.init.normal_(p, std=0.3)
    ids = torch.arange(3, 12)[None]
    plain.load_state_dict(merge_lora(model.state_dict(), model))
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(tiny.architecture(name)(input_ids=ids).logits, expected, atol=1e-3)


def test_the_checkpoint_is_merged_and_a_resume_is_exact(train_tiny, original):
    arguments = [*LORA, f"model.name_or_path={original}"]
    whole = train_tiny(*arguments, "optim.max_steps=4")
    resumed = train_tiny(*arguments, "optim.max_steps=4", folder=train_tiny(*arguments, "optim.max_steps=2"))
    one, other = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    before = load_file(original / "model.safetensors")
    assert one.keys() == before.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    moved = {name for name in one if not torch.equal(one[name], before[name])}
    assert moved == {name for name in one if "_proj" in name}
    _, info = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    guards = [record["reference"] for record in records if record["kind"] == "train"]
    assert guards[0] == pytest.approx(0, abs=5e-3)  # the mean of two steps, the first of them at the original
    assert guards[-1] > guards[0]


def test_compiled_layers_train_the_same(train_tiny, original, monkeypatch):
    """By torch's tracer without a compiler behind it, which machines need not have."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    arguments = [*LORA[:2], f"model.name_or_path={original}", "optim.max_steps=3", "recipe.max_dropout=0.5"]
    one = load_file(train_tiny(*arguments) / "model.safetensors")
    other = load_file(train_tiny(*arguments, "model.compile=true") / "model.safetensors")
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=1e-3)


def test_what_does_not_fit_is_refused(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("model: {architecture: {model_type: llama}, lora_rank: 4}\ndata: {path: [x]}\n")
    with pytest.raises(ConfigError, match=r"give model\.name_or_path"):
        load_config(config)
    with pytest.raises(ConfigError, match="give one of them"):
        load_config(config, ["model.architecture=null", "model.name_or_path=x", "recipe.preset=frozen-target"])
    with pytest.raises(ConfigError, match="lora_targets"):
        add_lora(tiny.llama(), ModelConfig(name_or_path="x", lora_rank=2, lora_targets=("nothing",)), 0, None)
    with pytest.raises(ConfigError, match="lora_rank is 33; no layer of this model has a rank above 32"):
        add_lora(tiny.llama(), ModelConfig(name_or_path="x", lora_rank=33), 0, None)
    add_lora(tiny.llama(), ModelConfig(name_or_path="x", lora_rank=32), 0, None)
