"""What the loop takes besides running layers: timed around layers that take no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerskip.decode.choice import Choice
from layerskip.decode.preparation import prepare_session
from layerskip.forecast.cost_model import Bookkeeping, tree_name
from layerskip.forecast.stopwatch import Stopwatch
from layerskip.model.anatomy import device_of, unwrap
from layerskip.model.stages import Stages
from layerskip.model.tree import parse_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IDLE_ROUNDS = 12  # in one timing


def measure_bookkeeping(
    model: nn.Module,
    max_draft_tokens: int = 8,
    repeats: int = 5,
    trees: Sequence[str | tuple[int, ...]] = (),
    **arguments: Any,
) -> Bookkeeping:
    """Time the loop around layers that take no time: every draft and verification gives the same logits at once.

    Args:
        model: in eval mode.
        max_draft_tokens: between 1 and this many drafted tokens the time is taken to grow evenly.
        trees: shapes that are timed too; all their nodes but one path are refused, and that is moved together.
        arguments: of `layerskip.generate`: `do_sample`, `temperature`, `top_p` and the like have their price.
    """
    inner = unwrap(model)
    few, many = 1, max(2, max_draft_tokens)
    settings: dict[str, dict[str, Any]] = {"plain": {"exit_layer": None, "num_draft_tokens": 0}}
    settings |= {str(n): {"exit_layer": 1, "num_draft_tokens": n} for n in (few, many)}
    named = {tree_name(tree): tree for tree in trees}
    settings |= {name: {"exit_layer": 1, "num_draft_tokens": 1, "tree": tree} for name, tree in named.items()}
    times = Stopwatch(device_of(inner))
    for repeat in range(repeats + 1):
        for name, setting in settings.items():
            _idle_rounds(inner, setting, times, name, arguments)
        if repeat == 0:
            times.forget()
    seconds = {name: times.median(name) / _IDLE_ROUNDS for name in settings}
    draft = max(0.0, (seconds[str(many)] - seconds[str(few)]) / (many - few))
    rounds = {name: seconds[name] for name in named}
    return Bookkeeping(seconds["plain"], draft, max(0.0, seconds[str(few)] - few * draft), rounds)


class _IdleStages:
    """Stands in for `Stages` in the loop: the same interface, no layers and no cache."""

    def __init__(self, stages: Stages, width: int) -> None:
        self.model, self.exit_layer = stages.model, stages.exit_layer
        device, dtype = device_of(stages.model), stages.model.dtype
        vocab_size = stages.model.get_input_embeddings().num_embeddings
        peaks = torch.arange(vocab_size, device=device).mul(0.7).sin().mul(8).to(dtype)  # some tokens likely, most not
        self._logits = peaks.expand(1, width, -1).clone()  # (1, width, vocab)
        self._hidden = torch.zeros(1, width, 1, device=device, dtype=dtype)

    def prefill(self, *args: Any) -> None:
        pass

    def draft(self, token_ids: Tensor, cache: Any, logits_to_keep: int = 0, block: Any = None) -> Any:
        logits = self._logits[:, :logits_to_keep] if logits_to_keep else None
        return logits, self._hidden[:, : token_ids.shape[1]]

    def verify(self, token_ids: Tensor, hidden: Tensor | None, cache: Any, block: Any = None) -> Tensor:
        return self._logits[:, : token_ids.shape[1]]


def _idle_rounds(
    model: PreTrainedModel, drafting: dict[str, Any], times: Stopwatch, name: str, arguments: dict[str, Any]
) -> None:
    """Time `_IDLE_ROUNDS` rounds."""
    shape = parse_shape(drafting["tree"]) if "tree" in drafting else None
    tokens = drafting["num_draft_tokens"] if shape is None else len(shape.widths)
    # Draft and target say the same, so that every draft is accepted and every round as long as it may be.
    arguments = {**arguments, "max_new_tokens": _IDLE_ROUNDS * (tokens + 1), "eos_token_id": None}
    prompt = torch.zeros(1, 2, dtype=torch.long, device=device_of(model))
    arguments["attention_mask"] = torch.ones_like(prompt)
    session = prepare_session(model, prompt, drafting, Choice(), **arguments)
    width = 1 + (tokens if shape is None else shape.num_nodes)
    if shape is not None:  # accepted paths are moved together in the cache, so there must be keys and values to move
        cache = session.stages.new_cache(2 + arguments["max_new_tokens"] + width)
        session.stages.prefill(prompt[:, :1], cache)
        cache.rollback(0)
        session = replace(session, cache=cache)
    idle: Any = _IdleStages(session.stages, width)
    session = replace(session, stages=idle)
    times.add(name, lambda: list(session.steps()))
