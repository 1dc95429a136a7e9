"""Exit adapters: the model stays what it was, bit for bit; the drafts change; both travel."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import layerskip
from layerskip.forecast import measure_exits
from layerskip.model.adapters import ADAPTERS_FILE, adapter_at, adapters_of
from layerskip.model.stages import Stages
from layerskip.training.recipe import Recipe, prepare
from tests import tiny

RECIPE = Recipe.preset("frozen-target", exits=(1, 2), adapter_rank=8)


def batch() -> torch.Tensor:
    return torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(1))


def trained(model, steps: int = 60):
    """Adapters after some steps on a small text."""
    handle = prepare(model, RECIPE)
    parameters = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(steps):
        handle.set_step(step)
        model(input_ids=batch(), labels=batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """An original model, its trained twin, and the twin's checkpoint."""
    original = tiny.llama()
    model = trained(copy.deepcopy(original))
    folder = tmp_path_factory.mktemp("frozen")
    model.save_pretrained(folder)
    return original, model, folder


def test_only_the_adapters_learn(checkpoint):
    original, model, _ = checkpoint
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert torch.equal(model(input_ids=batch()).logits, original(input_ids=batch()).logits)
    assert all(adapter_at(model, e).up.weight.any() for e in (1, 2))


def test_adapters_of_a_model_in_half_precision_learn_in_float32():
    """transformers loads a checkpoint in the dtype that it was saved in."""
    model = tiny.llama().to(torch.bfloat16)
    handle = prepare(model, RECIPE)
    model.train()(input_ids=batch(), labels=batch()).loss.backward()
    weights = [weight for adapter in handle.adapters.values() for weight in adapter.parameters()]
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert any(weight.grad.any() for weight in weights)


def test_an_upload_while_saving_would_leave_adapters_behind(tmp_path):
    model = tiny.llama()
    prepare(model, RECIPE)
    model.save_pretrained(tmp_path / "by place", True, None, False)
    assert (tmp_path / "by place" / ADAPTERS_FILE).is_file()
    with pytest.raises(ValueError, match=r"then model\.push_to_hub"):
        model.save_pretrained(tmp_path / "new", push_to_hub=True)
    assert not (tmp_path / "new").exists()


def test_a_model_with_a_recipe_is_pickled(tmp_path):
    model = tiny.llama().train()
    prepare(model, Recipe.preset("frozen-target", exits=(1,)))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    losses = [m(input_ids=batch(), labels=batch()).loss for m in (model, again)]
    assert torch.equal(*losses)


def test_a_recipe_that_trains_the_model_does_not_take_a_frozen_one():
    """Whose every step would train nothing, and be told by an error of autograd's."""
    model = tiny.llama()
    prepare(model, RECIPE).remove()
    with pytest.raises(ValueError, match=r"no weight of this model learns .* Call model.requires_grad_\(True\)"):
        prepare(model, Recipe())
    prepare(model.requires_grad_(True), Recipe())


def test_adapters_make_the_exits_agree_more(checkpoint):
    original, model, _ = checkpoint
    before, after = measure_exits(original, [batch()]), measure_exits(model, [batch()])
    for exit_layer in (1, 2):
        assert after[exit_layer].overlap > before[exit_layer].overlap + 0.05
    assert after[3].overlap == before[3].overlap


def test_new_adapters_are_the_identity(tiny_llama):
    before = measure_exits(tiny_llama, [batch()])
    prepare(tiny_llama, RECIPE)
    assert measure_exits(tiny_llama, [batch()])[1].overlap == before[1].overlap


def test_the_checkpoint_is_an_ordinary_one_and_carries_them(checkpoint):
    original, model, folder = checkpoint
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert torch.equal(plain(input_ids=batch()).logits, original(input_ids=batch()).logits)
    for exit_layer in (1, 2):
        assert torch.equal(adapter_at(plain, exit_layer).up.weight, adapter_at(model, exit_layer).up.weight)
    assert not any("layerskip" in name for name in plain.state_dict())


def test_drafts_use_them_and_the_output_is_the_originals(checkpoint):
    original, _, folder = checkpoint
    plain = AutoModelForCausalLM.from_pretrained(folder)
    prompt = batch()[:1, :6]
    expected = original.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None)
    for exit_layer in (1, 2, 3):
        out = layerskip.generate(
            plain,
            prompt,
            exit_layer=exit_layer,
            num_draft_tokens=3,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )
        assert torch.equal(out, expected)
    logits, _ = Stages(plain, 1).draft(prompt, Stages(plain, 1).new_cache(), 1)
    bare, _ = Stages(original, 1).draft(prompt, Stages(original, 1).new_cache(), 1)
    assert not torch.allclose(logits, bare)


def test_a_missing_file_is_said(checkpoint, tmp_path):
    model = checkpoint[1]
    model.save_pretrained(tmp_path)
    (tmp_path / ADAPTERS_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=ADAPTERS_FILE):
        adapters_of(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_file_of_other_adapters_is_said_in_one_line(checkpoint, tmp_path):
    other = trained(tiny.llama(), 1)
    other.save_pretrained(tmp_path)
    save_file({"1.down.weight": torch.zeros(2, 32)}, tmp_path / ADAPTERS_FILE)
    with pytest.raises(ValueError, match=r"rank 8 at exits 1, 2\): copy the file") as caught:
        adapters_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / ADAPTERS_FILE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="does not hold the adapters"):
        adapters_of(AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("changes", [{"exits": (3,)}, {"adapter_rank": 4}, {"exits": (1, 3)}])
def test_other_exits_or_another_rank_begin_anew(checkpoint, tmp_path, changes):
    again = AutoModelForCausalLM.from_pretrained(checkpoint[2]).train()
    recipe = replace(RECIPE, **changes)
    adapters = prepare(again, recipe).adapters
    assert adapters.keys() == {str(e) for e in recipe.exits}
    assert not any(adapter.up.weight.any() for adapter in adapters.values())
    again(input_ids=batch(), labels=batch()).loss.backward()
    again.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert adapter_at(loaded, recipe.exits[0]).down.weight.shape == (recipe.adapter_rank, 32)


@pytest.mark.parametrize("read", [False, True])
def test_a_model_that_is_trained_further_leaves_its_adapters_behind(checkpoint, tmp_path, read):
    again = AutoModelForCausalLM.from_pretrained(checkpoint[2])
    assert not read or adapter_at(again, 1) is not None
    prepare(again, Recipe())
    again.save_pretrained(tmp_path)
    for model in (again, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert adapters_of(model) is None


def test_a_frozen_model_has_nothing_to_drop():
    with pytest.raises(ValueError, match="max_dropout=0"):
        Recipe(adapter_rank=8, freeze_model=True)
    with pytest.raises(ValueError, match="give adapter_blocks"):
        Recipe(freeze_model=True, max_dropout=0)


def test_adapters_beside_a_model_that_trains_too():
    """Both learn; the last layer is in the loss; dropping layers is allowed."""
    model = tiny.llama()
    before = copy.deepcopy(model)
    handle = prepare(model.train(), Recipe(exits=(1,), adapter_rank=4, exit_weights="uniform", curriculum="all"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):  # a new adapter's `up` is zero, so `down` moves from the second step on
        handle.set_step(step)
        model(input_ids=batch(), labels=batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.active_exits == (1, 4)
    assert handle.adapters["1"].up.weight.any()
    for name, parameter in before.named_parameters():
        assert not torch.equal(parameter, model.get_parameter(name)), name


def test_a_resumed_training_goes_on_with_the_adapters_of_its_checkpoint(checkpoint):
    _, model, folder = checkpoint
    again = AutoModelForCausalLM.from_pretrained(folder)
    prepare(again, RECIPE)
    assert torch.equal(adapter_at(again, 2).up.weight, adapter_at(model, 2).up.weight)
    assert [name for name, p in again.named_parameters() if p.requires_grad] == [
        f"layerskip_adapters.{e}.{part}.weight" for e in (1, 2) for part in ("down", "up")
    ]
