"""What speculation will bring: acceptance of every exit from one teacher-forced pass, times costs on this machine.

A greedy draft goes on for as long as exit and model agree, a sampled one with the chance that their distributions
share, so one pass over text tells how every exit and every draft length would do; a handful of timed calls tells
what they cost. No grid of decoding runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter, thread_time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.anatomy import num_layers, unwrap
from layerskip.objective import IGNORE_INDEX
from layerskip.stages import Stages
from layerskip.views import ExitReader
from layerskip.walk import mean_acceptance_length


@dataclass
class ExitMeasurement:
    """One exit against the model, over held-out text.

    Attributes:
        loss: nats a token, cross-entropy to the text.
        agreement: share of positions whose most probable token is the model's.
        overlap: mean of 1 - TV(p, q), the chance that a token sampled from q is accepted (temperature 1).
        num_tokens: predicted positions.
    """

    loss: float = 0.0
    agreement: float = 0.0
    overlap: float = 0.0
    num_tokens: int = 0
    _agrees: list[Tensor] = field(default_factory=list, repr=False)  # (length,) each: a run of counted tokens
    _overlaps: list[Tensor] = field(default_factory=list, repr=False)  # the same

    def add(
        self, logits: Tensor, target_logits: Tensor, token_ids: Tensor, start: int = 1, labels: Tensor | None = None
    ) -> None:
        """Count (batch, length, vocab) logits of the exit and the model over tokens [start:) of (batch, length).

        Args:
            labels: (batch, length) like `token_ids`; tokens where it is -100 are not counted. None: all are.
        """
        counted = torch.ones_like(token_ids, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
        counted = counted[:, start:]  # (batch, length - start)
        number = int(counted.sum())
        if not number:
            return
        q = logits[:, start - 1 : -1][counted].float().log_softmax(-1)  # (number, vocab)
        p = target_logits[:, start - 1 : -1][counted].float().log_softmax(-1)
        agrees = q.argmax(-1) == p.argmax(-1)
        loss = F.nll_loss(q, token_ids[:, start:][counted])
        overlap = torch.minimum(p.exp(), q.exp()).sum(-1)
        share = number / (self.num_tokens + number)  # running means
        self.loss += share * (loss.item() - self.loss)
        self.agreement += share * (agrees.float().mean().item() - self.agreement)
        self.overlap += share * (overlap.mean().item() - self.overlap)
        self.num_tokens += number
        self._agrees.extend(_runs(agrees, counted))
        self._overlaps.extend(_runs(overlap, counted))

    def mean_acceptance_length(self, num_draft_tokens: int, sampled: bool = False) -> float:
        """Tokens a verify step commits, greedily or sampled at temperature 1: the text is walked as decoding would."""
        return mean_acceptance_length(self._overlaps if sampled else self._agrees, num_draft_tokens)


def _runs(values: Tensor, counted: Tensor) -> list[Tensor]:
    """The (number,) `values` at the true places of `counted` (batch, length), cut wherever a place is left out."""
    rows, columns = counted.nonzero(as_tuple=True)  # (number,) each, row by row
    breaks = (rows.diff() != 0) | (columns.diff() != 1)
    cuts = [0, *(breaks.nonzero().squeeze(1) + 1).tolist(), len(rows)]
    return list(values.cpu().split([last - first for first, last in pairwise(cuts)]))


def measure_exits(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Tensor]],
    exits: Sequence[int] | None = None,
    start: int = 1,
) -> dict[int, ExitMeasurement]:
    """Compare exits with the model over text, teacher-forced. Over the model's own continuations this is what
    decoding will see; over other text acceptance comes out too high or too low.

    Args:
        model: a causal LM; put in eval mode for the moment.
        batches: (batch, length) token ids without padding, at least one; or mappings with `input_ids` and, where
            some tokens do not count or several documents share a row, `labels` (-100: not counted) and
            `position_ids` (from 0 in each document), all (batch, length).
        exits: exit layers; None is all of 1 .. L-1.
        start: the first token that is counted, at least 1; those before it are the prompt.

    Returns:
        A measurement for each exit, and one under key L for the model itself.

    Raises:
        ValueError: if there is no batch.
    """
    inner = unwrap(model)
    last = num_layers(inner)
    exits = range(1, last) if exits is None else exits
    measured = {exit_layer: ExitMeasurement() for exit_layer in (*sorted(set(exits)), last)}
    training = inner.training
    inner.eval()
    try:
        reader = ExitReader(inner, exits)
        for batch in batches:
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            token_ids, labels = inputs["input_ids"], inputs.get("labels")
            logits, exit_logits = reader.read(token_ids, inputs.get("position_ids"))
            measured[last].add(logits, logits, token_ids, start, labels)
            for exit_layer, early in exit_logits:
                measured[exit_layer].add(early, logits, token_ids, start, labels)
    finally:
        inner.train(training)
    if not measured[last].num_tokens:
        raise ValueError("no text to measure exits on: give at least one batch of two tokens or more")
    return measured


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, at one context length and batch 1.

    Attributes:
        plain: one step of the whole model.
        draft: exit -> one drafted token: layers [0:E) and the head.
        extend: exit -> layers [0:E) without the head, which the last draft takes.
        verify: exit -> {positions: layers [E:L) and the head over that many}, linear in between.
    """

    plain: float
    draft: dict[int, float]
    extend: dict[int, float]
    verify: dict[int, dict[int, float]]

    def round(self, exit_layer: int, num_draft_tokens: int) -> float:
        """One draft-then-verify round."""
        verify = _interpolate(self.verify[exit_layer], num_draft_tokens + 1)
        return num_draft_tokens * self.draft[exit_layer] + self.extend[exit_layer] + verify


@torch.inference_mode()
def measure_costs(
    model: nn.Module, exits: Sequence[int], max_draft_tokens: int = 8, context: int = 128, repeats: int = 7
) -> Costs:
    """Time the stages of each exit layer on this machine: the fastest of `repeats` calls after one to warm up,
    since whatever else the machine does can only add to it."""
    inner = unwrap(model)
    training = inner.training
    inner.eval()
    draft, extend, verify = {}, {}, {}
    try:
        plain = _time_plain(Stages(inner, None), context, repeats)
        for exit_layer in sorted(set(exits)):
            clock = _StageClock(Stages(inner, exit_layer), context, repeats)
            draft[exit_layer], extend[exit_layer] = clock.draft(True), clock.draft(False)
            widths = sorted({1, 2, 3, 1 + max_draft_tokens // 2, 1 + max_draft_tokens})
            verify[exit_layer] = {width: clock.verify(width) for width in widths}
    finally:
        inner.train(training)
    return Costs(plain, draft, extend, verify)


@dataclass(frozen=True)
class Forecast:
    """A setting and what it should bring.

    Attributes:
        speedup: over plain decoding in the same loop; 1 is no gain.
    """

    exit_layer: int
    num_draft_tokens: int
    mean_acceptance_length: float
    speedup: float


def best_setting(
    measured: dict[int, ExitMeasurement], costs: Costs, max_draft_tokens: int = 8, sampled: bool = False
) -> list[Forecast]:
    """Every (exit layer, draft length) that both have seen, best first; for greedy decoding, or for sampling at
    temperature 1 (what drawing the tokens costs is left out, on both sides)."""
    forecasts = [
        Forecast(exit_layer, n, length, costs.plain * length / costs.round(exit_layer, n))
        for exit_layer in costs.draft
        for n in range(1, max_draft_tokens + 1)
        if (length := measured[exit_layer].mean_acceptance_length(n, sampled)) == length  # not nan: text too short
    ]
    return sorted(forecasts, key=lambda forecast: -forecast.speedup)


class _StageClock:
    def __init__(self, stages: Stages, context: int, repeats: int) -> None:
        self.stages, self.context, self.repeats = stages, context, repeats
        self.cache = _filled_cache(stages, context)

    def draft(self, with_logits: bool) -> float:
        token = _tokens(self.stages, 1)
        return self._time(lambda: self.stages.draft(token, self.cache, int(with_logits)))

    def verify(self, width: int) -> float:
        tokens = _tokens(self.stages, width)
        _, hidden = self.stages.draft(tokens, self.cache)
        self.cache.rollback(self.context)
        return self._time(lambda: self.stages.verify(tokens, hidden, self.cache))

    def _time(self, call: Callable[[], object]) -> float:
        return _fastest(self.stages.model.device, call, lambda: self.cache.rollback(self.context), self.repeats)


def _time_plain(stages: Stages, context: int, repeats: int) -> float:
    cache, token = _filled_cache(stages, context), _tokens(stages, 1)
    call = partial(stages.verify, token, None, cache)
    return _fastest(stages.model.device, call, lambda: cache.rollback(context), repeats)


def _fastest(device: torch.device, call: Callable[[], object], undo: Callable[[], None], repeats: int) -> float:
    # On a CPU the calling thread's own time: it works or spins while the others do, but does not count while the
    # machine runs something else. By the wall clock a busy machine makes long calls slow and leaves short ones alone,
    # which once made a forecast of 22x.
    clock = thread_time if device.type == "cpu" else perf_counter
    seconds = []
    for _ in range(repeats + 1):
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
        undo()
    return min(seconds[1:])


def _filled_cache(stages: Stages, context: int):  # type: ignore[no-untyped-def]
    cache = stages.new_cache(context + 64)
    stages.prefill(_tokens(stages, context), cache)
    return cache


def _tokens(stages: Stages, n: int) -> Tensor:
    vocab_size = stages.model.get_input_embeddings().num_embeddings
    return torch.arange(n, device=stages.model.device).remainder(vocab_size)[None]


def _interpolate(table: dict[int, float], x: int) -> float:
    """Linear between the two nearest measured points, and beyond the last two."""
    if x in table:
        return table[x]
    points = sorted(table)
    right = next((i for i, point in enumerate(points) if point > x), len(points) - 1)
    low, high = points[max(right - 1, 0)], points[max(right, 1)]
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)
