"""Layers that are not given the kept rows alone, and copies of a model with a recipe."""

import copy
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import DynamicCache

import layerskip
from layerskip.training.dropout import Decision, DropoutHooks
from layerskip.training.recipe import Recipe, prepare
from tests import tiny

# --- all rows run and are blended where their arguments cannot be selected ---

KEEP = torch.tensor([1, 0, 1, 1], dtype=torch.bool)
ADDED = torch.arange(1.0, 5.0)[:, None]  # (batch, 1)
Pair = namedtuple("Pair", "name rows")


class Adds(torch.nn.Module):
    """A layer that adds its rows' numbers, which it reads from what it is given."""

    layer_idx = 1

    def __init__(self, read):
        super().__init__()
        self.read, self.ran = read, 0

    def forward(self, hidden_states, given=None, **kwargs):
        self.ran = len(hidden_states)
        return hidden_states + self.read(given).reshape(-1, 1, 1)


def cache(layers: int) -> DynamicCache:
    """With the rows' numbers as keys of `layers` layers."""
    filled = DynamicCache()
    for index in range(layers):
        filled.update(ADDED[:, None, None], ADDED[:, None, None], index)
    return filled


def run(layer: Adds, given, batch: int = 4, length: int = 3, **kwargs) -> None:
    """One forward of a layer with dropout: its output is right."""
    x = torch.randn(batch, length, 5)
    DropoutHooks(layer, lambda rows: Decision(KEEP[:rows], 1.0))
    expected = x + (KEEP[:batch, None] * ADDED[:batch])[:, None]
    torch.testing.assert_close(layer.train()(x, given=given, **kwargs), expected)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (SimpleNamespace(rows=ADDED), lambda given: given.rows),  # an object, as flex attention's BlockMask is
        (UserDict(rows=ADDED), lambda given: given["rows"]),
        ([Pair("b", ADDED)], lambda given: given[0].rows),
        (ADDED[:, 0], lambda given: given),  # one dimension could be anything's
        (cache(2), lambda given: given.layers[1].keys),  # a prefix's
    ],
    ids=["object", "mapping", "named-tuple", "vector", "filled-cache"],
)
def test_all_rows_run_where_some_argument_cannot_be_selected(given, read):
    layer = Adds(read)
    run(layer, given)
    assert layer.ran == 4


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([ADDED, None, 1.5, "sdpa", True], lambda given: given[0]),
        ({"rows": (ADDED, torch.zeros(1, 3), torch.arange(3))}, lambda given: given["rows"][0]),
        ((ADDED, cache(1)), lambda given: given[0]),  # which holds the layer before's, of this forward
    ],
    ids=["list", "dict", "cache"],
)
def test_only_the_kept_rows_run_where_every_argument_can_be_selected(given, read):
    layer = Adds(read)
    run(layer, given, output_router_logits=False)
    assert layer.ran == 3


def test_all_rows_run_where_rows_are_as_many_as_positions():
    layer = Adds(lambda given: given)
    run(layer, ADDED[:3], batch=3, length=3)
    assert layer.ran == 3  # of which two are kept


@pytest.mark.filterwarnings("ignore:a training forward whose loss")
@torch.no_grad()  # flex attention has no backward on a CPU
def test_flex_attention_gives_what_others_give(tiny_llama):
    mask = torch.ones(8, 12, dtype=torch.long)
    mask[0, :4] = mask[3, :2] = 0
    handle = prepare(tiny_llama.train(), Recipe(max_dropout=0.5, exits=(1, 2)))
    logits = {}
    with torch.compiler.set_stance("force_eager"):  # not compiled: seconds
        for attention in ("sdpa", "flex_attention"):
            tiny_llama.set_attn_implementation(attention)
            handle.set_step(0)
            logits[attention] = tiny_llama(input_ids=batch(), attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits["flex_attention"], logits["sdpa"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("asked_by", ["argument", "config"])
def test_the_experts_balance_is_of_all_rows(name, asked_by):
    """transformers weighs every row's router logits by the mask of all of them."""
    model, ids = tiny.architecture(name).train(), batch()
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[3, :2] = 0
    handle = prepare(model, Recipe(max_dropout=0.6, dropout_depth="linear", exits=(1, 2)))
    handle.set_step(0)
    plain = model(input_ids=ids, attention_mask=mask, labels=ids)
    model.config.output_router_logits = asked_by == "config"
    asked = {"output_router_logits": True} if asked_by == "argument" else {}
    handle.set_step(0)
    balanced = model(input_ids=ids, attention_mask=mask, labels=ids, **asked)
    assert [len(logits) for logits in balanced.router_logits] == [ids.numel()] * tiny.NUM_LAYERS
    torch.testing.assert_close(balanced.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-5, rtol=1e-4)
    share = model.config.router_aux_loss_coef * balanced.aux_loss
    torch.testing.assert_close(balanced.loss, plain.loss + share, atol=1e-5, rtol=1e-5)
    balanced.loss.backward()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_are_asked_for_their_routing_draft(name):
    """By the config, and before the model has ever run: its own forward would find what views do not have."""
    model = tiny.endless(tiny.architecture(name))
    model.config.output_router_logits = True
    settings = {"max_new_tokens": 8, "do_sample": False}
    drafted = layerskip.generate(model, batch(1), exit_layer=1, num_draft_tokens=3, **settings)
    assert torch.equal(drafted, model.generate(batch(1), **settings))
    handle = prepare(tiny.architecture(name), Recipe.preset("frozen-target", adapter_blocks=1))
    handle.model.config.output_router_logits = True
    handle.model.train()(input_ids=batch(), labels=batch()).loss.backward()


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
