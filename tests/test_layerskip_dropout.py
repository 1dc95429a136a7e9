"""Layer dropout on layers whose rows cannot be selected, and copies of a model with a recipe."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from layerskip.training.recipe import Recipe, prepare

# --- copies ---


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: AveragedModel(model).module])
def test_a_deep_copy_is_the_model_without_the_recipe(tiny_llama, copied_by):
    """As weight averages and references are made; the original keeps its recipe and its place."""
    ids, plain = batch(), copy.deepcopy(tiny_llama).train()
    handle = prepare(tiny_llama, Recipe(max_dropout=0.9, exits=(1, 2), reference_weight=0.1))
    handle.set_step(0)
    recipe_loss = tiny_llama.train()(input_ids=ids, labels=ids).loss
    copied = copied_by(tiny_llama)
    assert torch.equal(copied(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)
    assert not hasattr(copied, "_layerskip_handle")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in copied.modules())
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in tiny_llama.parameters()}
    handle.set_step(0)
    assert torch.equal(tiny_llama(input_ids=ids, labels=ids).loss, recipe_loss)
    prepare(copy.deepcopy(copied), Recipe())  # a copy takes a recipe of its own
    handle.remove()
    assert torch.equal(copy.deepcopy(tiny_llama)(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)


def batch(rows: int = 8, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))
