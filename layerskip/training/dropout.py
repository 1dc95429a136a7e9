"""Layer dropout: a sample passes a layer by with a rate that grows with depth (paper, 4.1.1).

    x_{l+1} = x_l + M(p_{l,t}) f_l(x_l),    p_{l,t} = S(t) D(l) p_max

without any rescaling, unless asked for (a kept layer's contribution is then divided by 1 - p_{l,t}, arXiv
2609.05275). Dropped samples cost no compute: they are taken out of the batch before the layer and put back after it
(but see `DropoutHooks`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from layerskip.training.randomness import row_uniforms
from layerskip.training.recipe import Recipe


@lru_cache(maxsize=8)  # asked at every layer, for a step or two at a time
def dropout_rates(recipe: Recipe, num_layers: int, step: int) -> tuple[float, ...]:
    """p_{l,t} for l = 0 .. L-1 at optimizer step `step`: 0 at the first layer, S(t) p_max at the last."""
    time = _time_scale(recipe, step)
    return tuple(time * _depth_scale(recipe, l, num_layers) * recipe.max_dropout for l in range(num_layers))


def _depth_scale(recipe: Recipe, layer: int, num_layers: int) -> float:
    depth = layer / (num_layers - 1)
    return depth if recipe.dropout_depth == "linear" else 2.0**depth - 1.0


def _time_scale(recipe: Recipe, step: int) -> float:
    if recipe.dropout_time == "constant":
        return 1.0
    assert recipe.total_steps is not None
    time = min(step / max(recipe.total_steps - 1, 1), 1.0)
    return 2.0**time - 1.0 if recipe.dropout_time == "rising" else 1.0 - time


def keep_decisions(
    rates: tuple[float, ...], rows: int, seed: int, step: int, first_row: int, per: str = "sample"
) -> Tensor:
    """Which samples run which layer in one forward: (L, rows) booleans on the CPU.

    A pure function of its arguments, drawn row by row of the step's *global* batch: a sample's decisions do not depend
    on how many processes and micro-steps share the batch, and gradient checkpointing's recompute and a resumed run see
    them again.

    Args:
        rows: samples of this forward, the global rows first_row .. first_row + rows - 1.
        per: "sample", or "batch": one decision for all rows of the step.
    """
    if per == "batch":
        first_row = 0
    uniforms = row_uniforms(len(rates), first_row, 1 if per == "batch" else rows, seed, step)
    return (uniforms >= torch.tensor(rates)).T.expand(len(rates), rows)


class Decision(NamedTuple):
    """For one layer in one micro-step: keep (rows,) booleans, and what a kept layer's contribution is multiplied by."""

    keep: Tensor
    scale: float


class _Pending(NamedTuple):
    """What the hook before a layer leaves for the one after it."""

    hidden: Tensor  # (batch, length, hidden_size) before the layer
    keep: Tensor  # (batch,) booleans
    kept: Tensor | None  # (kept,) the rows that were run; None: all of them
    scale: float


class DropoutHooks:
    """Drops rows from one decoder layer, by a hook before it and one after it.

    The layer is given the kept rows alone where they can be selected from all that it is given. Elsewhere it runs all
    rows, and those that were dropped take back what they were before: the same result without the saving. That is so
    where there are as many rows as positions or a dimension of heads is fused with the batch's, for objects such as
    flex attention's block mask, and where the experts' router logits are asked for, whose loss is of all rows.

    Args:
        layer: the decoder layer.
        decide: returns this layer's `Decision` for a batch of so many rows, or None to run it whole.
    """

    def __init__(self, layer: nn.Module, decide: Callable[[int], Decision | None]) -> None:
        self.decide = decide
        self._pending: _Pending | None = None
        self.handles = [
            layer.register_forward_pre_hook(self._before, with_kwargs=True),
            layer.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._pending = None
        hidden = args[0] if args else kwargs["hidden_states"]  # (batch, length, hidden_size)
        decision = self.decide(hidden.shape[0]) if layer.training else None
        if decision is None or (bool(decision.keep.all()) and decision.scale == 1):
            return None
        keep = decision.keep.to(hidden.device)
        if bool(decision.keep.all()) or not _selectable(layer, args, kwargs, hidden.shape):
            self._pending = _Pending(hidden, keep, None, decision.scale)  # run all rows, blend afterwards
            return None
        # Where every row is dropped one still runs, and its output is not used: a layer that takes no part
        # would leave its parameters unsynchronised, or hang the other processes' collectives.
        kept = decision.keep.nonzero().squeeze(1) if bool(decision.keep.any()) else torch.zeros(1, dtype=torch.long)
        kept = kept.to(hidden.device)
        self._pending = _Pending(hidden, keep, kept, decision.scale)
        return _select_rows((args, kwargs), kept, hidden.shape[0])

    def _after(self, layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._pending is None:
            return None
        (hidden, keep, kept, scale), self._pending = self._pending, None
        result = output[0] if isinstance(output, tuple) else output
        hidden = hidden.to(result.dtype)
        before = hidden if kept is None else hidden[kept]
        if scale != 1:
            result = before + (result - before) * scale
        if kept is None:
            whole = result if bool(keep.all()) else torch.where(keep[:, None, None], result, hidden)
        else:
            if len(kept) == 1:  # perhaps the row that ran for nothing
                result = torch.where(keep[kept, None, None], result, before)
            whole = hidden.index_copy(0, kept, result)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _selectable(layer: nn.Module, args: tuple, kwargs: dict, shape: torch.Size) -> bool:
    """Whether `_select_rows` finds the rows, and nothing but rows, in all that a layer is given.

    Args:
        shape: of its hidden states, (batch, length, hidden_size).
    """
    if shape[0] == shape[1] or kwargs.get("output_router_logits"):
        return False
    return _rows_are_plain((args, kwargs), shape[0], layer)


def _rows_are_plain(value: Any, batch: int, layer: nn.Module) -> bool:
    if isinstance(value, Tensor):  # a vector as long as the batch may be of rows or of anything else
        return value.shape[0] in (1, batch) if value.dim() > 1 else value.shape != (batch,)
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (tuple, list):
        return all(_rows_are_plain(item, batch, layer) for item in value)
    return value is None or isinstance(value, (str, int, float)) or (isinstance(value, Cache) and _empty(value, layer))


def _empty(cache: Cache, layer: nn.Module) -> bool:
    """Whether a cache holds nothing for this layer yet: there is no prefix, and what is kept of it is never read."""
    index: Any = next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), None)
    if index is None or not hasattr(cache, "layers"):
        return False
    return all(state.dim() < 2 for own in cache.layers[index : index + 1] for state in _tensors(vars(own)))


def _select_rows(value: Any, rows: Tensor, batch: int) -> Any:
    """`value` with the rows of every batch-sized tensor in it selected."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() >= 2 and value.shape[0] == batch else value
    if type(value) in (tuple, list):
        return type(value)(_select_rows(item, rows, batch) for item in value)
    if type(value) is dict:
        return {name: _select_rows(item, rows, batch) for name, item in value.items()}
    return value
