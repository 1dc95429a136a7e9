"""A model is checked against its own stages, and against itself one row at a time, before it is decoded. Once each."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.model.anatomy import UnsupportedModelError, device_of
from layerskip.model.block import place

if TYPE_CHECKING:
    from layerskip.model.stages import Stages

# Relative error allowed between the stages and the model at construction. Both run the same kernels on the
# same shapes, so the difference is zero on every architecture tried; the slack is for nondeterministic kernels.
SELF_CHECK_TOLERANCE = 1e-3


@torch.no_grad()
def check_cut(stages: Stages, exit_layer: int) -> None:
    """[0:E) then [E:L) over two chunks must give the model's own logits. Asked once for each exit.

    Raises:
        UnsupportedModelError: with how much they differ.
    """
    if exit_layer in _checks(stages.model):
        return
    vocab_size = stages.model.get_input_embeddings().num_embeddings
    token_ids = torch.arange(3, 10, device=device_of(stages.model)).remainder(vocab_size)[None]  # (1, 7)
    _check_positions(stages.model, token_ids)
    whole, staged = stages.new_cache(8), stages.new_cache(8)
    for chunk in token_ids.split([4, 3], dim=1):
        expected = stages.run(stages.model, chunk, whole, logits_to_keep=chunk.shape[1])
        _, hidden = stages.draft(chunk, staged)
        actual = stages.verify(chunk, hidden, staged)
        error = _relative_error(actual, expected)
        if not error <= SELF_CHECK_TOLERANCE:
            raise UnsupportedModelError(
                f"{type(stages.model).__name__}: layers [0:{stages.exit_layer}) then [{stages.exit_layer}:"
                f"{stages.num_layers}) differ from the whole model (relative error {error:.1e}, limit "
                f"{SELF_CHECK_TOLERANCE:.0e}); decode it with plain model.generate()"
            )
    _checks(stages.model).add(exit_layer)


@torch.no_grad()
def check_blocks(stages: Stages, branching: bool) -> None:
    """Refuse a model that cannot take rows of unequal length, or (`branching`) candidate trees. Asked once.

    Raises:
        UnsupportedModelError: with the reason and the way out.
    """
    asked, what = ("trees", "branches") if branching else ("batches", "rows of unequal length")
    state = _checks(stages.model)
    if asked in state:
        return
    attention = stages.model.config._attn_implementation
    way_out = "draft a chain (leave tree out)" if branching else "decode one sequence at a time"
    if attention not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"{attention} takes no mask of its own for {what}: load the model with attn_implementation='sdpa', "
            f"or {way_out}"
        )
    error, rounding = _block_error(stages, branching)
    limit = max(SELF_CHECK_TOLERANCE, 4 * rounding)
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(stages.model).__name__} does not reproduce itself for {what} (relative error {error:.1e}, limit "
            f"{limit:.0e}): {way_out}"
        )
    state.add(asked)


def _block_error(stages: Stages, branching: bool) -> tuple[float, float]:
    """Two rows of 5 and 3 tokens, then two more tokens for each, in a row or side by side: against one by one.

    Returns the relative error, and that of decoding one row in two passes instead of one, which is rounding.
    """
    device, vocab_size = device_of(stages.model), stages.model.get_input_embeddings().num_embeddings
    prompts = torch.arange(3, 13, device=device).remainder(vocab_size).view(2, 5)
    nodes = torch.arange(20, 26, device=device).remainder(vocab_size).view(2, 3)  # a root and two tokens
    lengths = torch.tensor([5, 3], device=device)
    depths = torch.tensor([[0, 1, 1 if branching else 2]] * 2, device=device)
    ancestors = torch.ones(2, 3, 3, dtype=torch.bool, device=device).tril()
    ancestors[:, 2, 1] = not branching
    cache = stages.new_cache(8)
    stages.prefill(prompts, cache)
    actual = stages.run(stages.whole, nodes, cache.stage(0, stages.num_layers, place(lengths, depths, ancestors)), 3)
    errors = []
    for row, length in enumerate((5, 3)):
        for node in (1, 2):
            path = nodes[row, [0, 2] if branching and node == 2 else range(node + 1)]
            sequence = torch.cat([prompts[row, :length], path])[None]
            expected = stages.model(input_ids=sequence, use_cache=False).logits[0, -1]
            errors.append(_relative_error(actual[row, node], expected))
    cache = stages.new_cache(8)
    stages.prefill(sequence[:, :-1], cache)
    stepped = stages.run(stages.model, sequence[:, -1:], cache, 1)[0, -1]
    return max(errors), _relative_error(stepped, expected)


def _check_positions(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Positions are left to the model, so it must count them as `generate` does: 0, 1, 2, ..."""
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    expected = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits
    error = _relative_error(model(input_ids=token_ids, use_cache=False).logits, expected)
    if not error <= SELF_CHECK_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(model).__name__} counts positions in a way of its own (relative error {error:.1e} against "
            "0, 1, 2, ...), or its output is not finite; decode it with plain model.generate()"
        )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


_checked: weakref.WeakKeyDictionary[nn.Module, dict[Any, set[int | str]]] = weakref.WeakKeyDictionary()


def _checks(model: PreTrainedModel) -> set[int | str]:
    """What was checked for this model as it is now (dtype, device, attention): exit layers, "batches", "trees"."""
    state = (model.dtype, device_of(model), model.config._attn_implementation)
    return _checked.setdefault(model, {}).setdefault(state, set())
