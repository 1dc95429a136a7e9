"""The draft as a model of its own is the exit, logit for logit; transformers' own early exit stays exact."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from layerskip.checkpoint.settings import KEY, Setting, carry, store_setting
from layerskip.model.adapters import attach_adapters
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.model.exit_reader import ExitReader
from layerskip.share.export import carries_early_exit, check_early_exit, export_draft, write_early_exit
from tests import tiny

TOKENS = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(0))  # past every window
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
# transformers' own early exit relies on models that loop over `layers[: num_hidden_layers]`.
WITHOUT_EARLY_EXIT = {
    *("gpt2", "gpt_neox", "opt", "opt-projected", "falcon", "bloom", "cohere2", "llama4", "gpt_oss"),
}


def greedy(model, **arguments):
    return model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **GREEDY, **arguments)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_draft_is_the_exit_and_drafts_for_the_model_it_was_cut_from(name, tmp_path):
    model = tiny.architecture(name)
    for exit_layer in (1, 3):
        export_draft(model, exit_layer, tmp_path / str(exit_layer))
        draft = AutoModelForCausalLM.from_pretrained(tmp_path / str(exit_layer), dtype="float32").eval()
        config = draft.config.get_text_config(decoder=True)
        assert config.num_hidden_layers == exit_layer
        lists = {key: value for key, value in config.to_dict().items() if "layer" in key and isinstance(value, list)}
        whole = model.config.get_text_config(decoder=True).to_dict()
        for key, value in lists.items():
            assert value == [entry for entry in whole[key][:exit_layer] if key != "moe_layers" or entry < exit_layer]
        expected = dict(ExitReader(model, [exit_layer]).read(TOKENS)[1])[exit_layer]
        with torch.no_grad():
            torch.testing.assert_close(draft(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(greedy(model, assistant_model=draft), greedy(model))


def test_a_draft_is_an_ordinary_checkpoint_that_carries_nothing_of_ours(tmp_path):
    model = tiny.llama(tie_word_embeddings=True).bfloat16()
    store_setting(model, Setting(2, 5))
    carry(model.config, recipe={"exits": [2]})
    model.generation_config.assistant_early_exit = 2
    export_draft(model, 2, tmp_path / "draft", num_draft_tokens=5)
    files = {path.name for path in (tmp_path / "draft").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert KEY not in config
    assert (config["num_hidden_layers"], config["dtype"]) == (2, "bfloat16")
    generation = GenerationConfig.from_pretrained(tmp_path / "draft")
    assert not hasattr(generation, KEY)
    assert generation.assistant_early_exit is None
    assert (generation.num_assistant_tokens, generation.num_assistant_tokens_schedule) == (5, "constant")
    assert model.config.num_hidden_layers == tiny.NUM_LAYERS  # the model is as it was
    assert model.generation_config.assistant_early_exit == 2
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size < 0.7 * 2 * model.num_parameters() + 4096


def with_adapter(model, rank=6):
    adapters = attach_adapters(model, [2], rank)
    torch.nn.init.normal_(adapters["2"].up.weight, std=0.5)
    return model.eval()


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_becomes_one_more_layer_of_plain_weights(bias, tmp_path):
    model = with_adapter(tiny.llama(mlp_bias=bias))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_()
    before = greedy(model)
    export_draft(model, 2, tmp_path / "draft")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype="float32").eval()
    assert (draft.config.num_hidden_layers, draft.config.mlp_bias) == (3, True)
    expected = dict(ExitReader(model, [2]).read(TOKENS)[1])[2]
    with torch.no_grad():
        torch.testing.assert_close(draft(TOKENS).logits, expected, atol=2e-4, rtol=2e-4)
        without = tiny.llama(mlp_bias=bias)
        plain = dict(ExitReader(without, [2]).read(TOKENS)[1])[2]
        assert (plain - expected).norm() > 0.1 * expected.norm()  # the adapter says something
    assert torch.equal(greedy(model, assistant_model=draft), before)
    assert model.config.mlp_bias is bias


@pytest.mark.parametrize(
    ("model", "rank", "reason"),
    [
        (lambda: tiny.architecture("gpt2"), 6, "it needs layers of a gated MLP that may have biases"),
        (lambda: tiny.architecture("qwen2"), 6, "it needs layers of a gated MLP that may have biases"),
        (lambda: tiny.llama(hidden_act="gelu"), 6, "it needs a silu in its MLP, not gelu"),
        (lambda: tiny.llama(), 49, "it needs an MLP as wide as the adapter's rank of 49, not 48"),
    ],
)
def test_an_adapter_that_no_plain_weights_can_hold_is_refused(model, rank, reason, tmp_path):
    with pytest.raises(UnsupportedModelError, match=f"drafts through an adapter, which is no plain weight.*{reason}"):
        export_draft(with_adapter(model(), rank), 2, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_is_not_the_exit_is_refused_and_nothing_is_left(tmp_path):
    model = with_adapter(tiny.architecture("granite"))  # its layers scale what they add
    with pytest.raises(UnsupportedModelError, match="does not give the exit's logits"):
        export_draft(model, 2, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="exit_layer=4 is out of range"):
        export_draft(tiny.llama(), 4, tmp_path / "draft")


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_transformers_early_exit_is_tried_and_where_it_fails_refused(name):
    model = tiny.architecture(name)
    if name in WITHOUT_EARLY_EXIT:
        with pytest.raises(UnsupportedModelError, match="transformers' own early exit does not work with"):
            check_early_exit(model, 2)
    else:
        check_early_exit(model, 2)
    assert model.config.num_hidden_layers == tiny.NUM_LAYERS
    greedy(model)  # usable still


def test_early_exit_is_kept_where_plain_transformers_finds_it(tmp_path, monkeypatch):
    model = tiny.llama()
    store_setting(model, Setting(2, 3))
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert not carries_early_exit(tmp_path)
    write_early_exit(tmp_path, 2, 3)
    assert carries_early_exit(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    passes = []
    loaded.model.layers[0].register_forward_hook(lambda *_: passes.append(loaded.config.num_hidden_layers))
    assert torch.equal(greedy(loaded), greedy(model))
    assert {2, tiny.NUM_LAYERS} == set(passes)  # drafted with two layers, verified with all
    write_early_exit(tmp_path, None, None)
    without = json.loads((tmp_path / "generation_config.json").read_text())
    assert without == {name: value for name, value in stored.items() if name != "_from_model_config"}
    assert without[KEY] == {"exit_layer": 2, "num_draft_tokens": 3}


def test_early_exit_where_there_was_no_generation_config(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    write_early_exit(tmp_path, 1, None)
    config = GenerationConfig.from_pretrained(tmp_path)
    assert (config.assistant_early_exit, config.eos_token_id, config.num_assistant_tokens) == (1, 2, None)
