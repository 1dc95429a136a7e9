"""The cache against transformers' own, through growth, rollback and views."""

import inspect

import pytest
import torch
from transformers import DynamicCache

from layerskip.model.cache import RollbackCache
from layerskip.model.cache_layer import RollbackLayer
from tests import tiny


def states(n: int, heads: int = 2, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, heads, n, width), torch.randn(1, heads, n, width + 1)  # MLA's keys and values differ


def test_it_holds_what_a_dynamic_cache_holds():
    ours, theirs = RollbackCache(2, capacity=2), DynamicCache()
    for n, back in ((3, 0), (1, 1), (5, 2), (9, 4), (1, 0), (40, 17)):
        for layer in range(2):
            keys, values = states(n)
            got = ours.update(keys, values, layer)
            expected = theirs.update(keys, values, layer)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        ours.rollback(ours.length - back)
        theirs.crop(-back)
        assert ours.length == theirs.get_seq_length() == ours.get_seq_length()
        assert torch.equal(ours.layers[1].keys, theirs.layers[1].keys)
        assert torch.equal(ours.layers[0].values, theirs.layers[0].values)


def test_writes_are_in_place_until_it_is_full():
    layer = RollbackLayer(capacity=8)
    layer.update(*states(3))
    buffer = layer._keys.data_ptr()
    for _ in range(20):
        layer.update(*states(5))
        layer.rollback(3)
    assert layer._keys.data_ptr() == buffer
    layer.update(*states(6))
    assert layer.capacity == 16


def test_growth_stops_at_the_limit():
    layer = RollbackLayer(capacity=8, limit=11)
    layer.update(*states(8))
    layer.update(*states(1))
    assert layer.capacity == 11
    layer.update(*states(4))  # a limit is a hint about memory, not a wall
    assert layer.length == 13


def test_rollback_is_one_assignment():
    layer = RollbackLayer(capacity=64)
    layer.update(*states(40))
    before = layer._keys.clone()
    layer.rollback(7)
    assert layer.keys.shape[-2] == 7
    assert torch.equal(layer._keys[:, :, :40], before[:, :, :40])  # nothing was moved


def test_rollback_refuses_the_future():
    layer = RollbackLayer()
    layer.update(*states(4))
    with pytest.raises(ValueError, match="cannot roll back to 5 positions: the layer holds 4"):
        layer.rollback(5)


def test_early_layers_may_run_ahead():
    cache = RollbackCache(4, capacity=4)
    early, late = cache.stage(0, 2), cache.stage(2, 4)
    for layer in (0, 1):
        early.update(*states(5), layer)
    assert (early.get_seq_length(), late.get_seq_length()) == (5, 0)
    assert early.get_mask_sizes(1, 3) == (
        6,
        0,
    )  # asked about another stage's layer, a view answers for its own
    assert late.get_mask_sizes(2, 0) == (2, 0)
    with pytest.raises(RuntimeError, match=r"\[0, 5\]"):
        _ = cache.length
    for layer in (2, 3):
        late.update(*states(3), layer)
    cache.rollback(2)
    assert cache.length == 2


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_transformers_itself_can_decode_with_it(name):
    model, ids = tiny.architecture(name), torch.randint(3, 64, (1, 11))
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = RollbackCache(tiny.NUM_LAYERS, capacity=4)
    expected = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None)
    actual = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None, **{argument: cache})
    assert torch.equal(actual, expected)
    assert cache.length == actual.shape[1] - 1
    assert cache.layers[0].keys.shape[-2] == cache.length


def test_an_empty_layer_shows_nothing():
    layer = RollbackLayer()
    assert layer.keys is None
    assert layer.values is None
    layer.update(*states(2))
    layer.reset()
    assert layer.keys.shape[-2] == layer.values.shape[-2] == 0
