"""Checkpoints that others made are loaded as they are and decode; without a setting in them, the advice is to tune."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import layerskip
from infer.command import main
from layerskip.checkpoint.settings import store_setting
from tests import tiny

GREEDY = {"max_new_tokens": 16, "do_sample": False}
PROMPT = "def add(a, b):"


def in_shards(model, folder: Path, metadata: dict[str, str] | None) -> None:
    """Half of the weights in each of two files, with the index that names them."""
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    names, files = sorted(weights), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: files[i * 2 // len(names)] for i, name in enumerate(names)}
    for file in files:
        save_file({name: weights[name] for name in names if where[name] == file}, folder / file, metadata)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def facebook(folder: Path, model) -> None:
    """As facebook/layerskip-*: written by transformers 4, half precision, no padding token, none of our keys."""
    model = model.half()
    config = model.config
    old = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        **{name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")},
        "max_position_embeddings": 256,
        "rms_norm_eps": config.rms_norm_eps,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.45.2",
        "use_cache": True,
        "initializer_range": 0.02,
    }
    (folder / "config.json").write_text(json.dumps(old))
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.45.2"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    in_shards(model, folder, {"format": "pt"})


def torchtune(folder: Path, model) -> None:
    """As an early-exit run of torchtune leaves it: new shards beside the small files of the model it began from, and
    the state of the run."""
    model.config.save_pretrained(folder)
    in_shards(model, folder, {"format": "pt"})
    (folder / "recipe_state").mkdir()
    torch.save({"epochs_run": 1}, folder / "recipe_state" / "recipe_state.pt")


def untrained(folder: Path, model) -> None:
    """Any causal LM, as `save_pretrained` writes it."""
    model.save_pretrained(folder)


@pytest.fixture(params=[facebook, torchtune, untrained], ids=lambda form: form.__name__)
def folder(request, tmp_path) -> Path:
    tokenizer = tiny.tokenizer()
    request.param(tmp_path, tiny.llama(vocab_size=len(tokenizer)))
    if request.param is facebook:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_it_decodes_at_the_exit_that_is_named_and_advises_to_tune(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = layerskip.generate(model, **inputs, exit_layer=2, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.num_drafted > 0
    advice = r"carries no tuned exit layer.*give exit_layer=1 … 3 \(infer tune --write"
    with pytest.warns(UserWarning, match=advice) as warned:
        assert torch.equal(layerskip.generate(model, **inputs, **GREEDY), expected)
    assert [warning.filename for warning in warned] == [__file__]  # the caller's line
    pair = {name: rows.repeat(2, 1) for name, rows in inputs.items()}  # rows with processors of their own
    with pytest.warns(UserWarning, match=advice) as warned:
        layerskip.generate(model, **pair, **GREEDY, repetition_penalty=1.2)
    assert [warning.filename for warning in warned] == [__file__]


def test_the_programs_take_it(folder, tokenizer, capsys):
    flags = ["--max-new-tokens", "16", "--dtype", "float32"]
    assert main(["generate", str(folder), PROMPT, *flags]) == 0
    plain, said = capsys.readouterr()
    assert (
        "no tuned exit layer and is decoded plainly: give --exit-layer to draft, or have python -m infer tune" in said
    )
    assert main(["generate", str(folder), PROMPT, *flags, "--exit-layer", "2"]) == 0
    drafted, said = capsys.readouterr()
    assert drafted == plain
    assert "no tuned exit layer" not in said
    assert main(["export", str(folder), "--draft", str(folder / "draft"), "--exit-layer", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["num_hidden_layers"] == 2


def test_a_verdict_of_off_is_plain_decoding_without_advice(folder, tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    store_setting(model, layerskip.Setting(None, 0))
    model.save_pretrained(tmp_path / "tuned")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = layerskip.generate(model, **inputs, **GREEDY, return_dict_in_generate=True)
    assert output.statistics.num_drafted == 0
    assert torch.equal(output.sequences, model.generate(**inputs, **GREEDY))
