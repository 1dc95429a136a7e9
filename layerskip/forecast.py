"""What speculation will bring: acceptance of every exit from one teacher-forced pass, times costs on this machine.

A greedy draft goes on for as long as exit and model agree, a sampled one with the chance that their distributions
share, so one pass over text tells how every exit and every draft length would do; a handful of timed calls tells
what they cost. No grid of decoding runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from layerskip.anatomy import num_layers, unwrap
from layerskip.costs import Costs
from layerskip.costs import measure_costs as measure_costs
from layerskip.objective import IGNORE_INDEX
from layerskip.views import ExitReader
from layerskip.walk import mean_acceptance_length


@dataclass(frozen=True)
class Cycle:
    """A draft-then-verify round on paper.

    Attributes:
        tokens: expected tokens that it commits, the verification's own included.
        time: in the unit of the costs.
        speedup: over plain decoding; 1 is no gain.
    """

    tokens: float
    time: float
    speedup: float


def cycle(
    acceptance: float,
    num_draft_tokens: int,
    draft_cost: float,
    verify_cost: float,
    state_cost: float = 0.0,
    plain_cost: float = 1.0,
) -> Cycle:
    """A round if every draft is accepted with the same chance, whatever came before (Leviathan et al. 2023, 3.1).

        tokens  = 1 + a + ... + a^N = (1 - a^(N+1)) / (1 - a)
        time    = N draft + verify + state
        speedup = tokens plain / time

    Args:
        acceptance: a, 0 to 1.
        num_draft_tokens: N, 0 or more.
        draft_cost: of one drafted token: layers [0:E) and the head.
        verify_cost: of verifying N + 1 tokens: layers [E:L) and the head.
        state_cost: what a round takes besides: layers [0:E) for the last draft, the rule, the rollback.
        plain_cost: of a token of plain decoding.

    Raises:
        ValueError: if a value is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} is no share: 0 to 1")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is out of range: 0 or more")
    if min(draft_cost, state_cost) < 0 or min(verify_cost, plain_cost) <= 0:
        raise ValueError("costs must be 0 or more, and those of verification and plain decoding above 0")
    tokens = float(sum(acceptance**n for n in range(num_draft_tokens + 1)))
    time = num_draft_tokens * draft_cost + verify_cost + state_cost
    return Cycle(tokens, time, tokens * plain_cost / time)


@dataclass
class ExitMeasurement:
    """One exit against the model, over held-out text.

    Attributes:
        loss: nats a token, cross-entropy to the text; nan for a cut head, which leaves tokens out.
        agreement: share of positions whose most probable token is the model's.
        overlap: mean of 1 - TV(p, q), the chance that a token sampled from q is accepted.
        num_tokens: predicted positions.
        cut: the same with the head cut to the draft vocabulary, where one was given.
    """

    loss: float = 0.0
    agreement: float = 0.0
    overlap: float = 0.0
    num_tokens: int = 0
    cut: ExitMeasurement | None = None
    _agrees: list[Tensor] = field(default_factory=list, repr=False)  # (length,) each: a run of counted tokens
    _overlaps: list[Tensor] = field(default_factory=list, repr=False)  # the same

    def _add(self, logits: Tensor, text: _Text, token_ids: Tensor | None = None) -> None:
        """Count the exit's logits (batch, length, vocab), or those of the tokens (n,) alone that its head has."""
        q = text.of(logits)  # (number, vocab)
        if not len(q):
            return
        p, loss = text.target, float("nan")
        if token_ids is None:
            loss = F.cross_entropy(q, text.token_ids).item()
            agrees = q.argmax(-1) == text.chosen
        else:
            q, p = q[:, token_ids], p[:, token_ids]  # (number, n) each
            agrees = token_ids[q.argmax(-1)] == text.chosen
        overlap = torch.minimum(p, text.warp(q).softmax(-1)).sum(-1)
        share = len(q) / (self.num_tokens + len(q))  # running means
        self.loss += share * (loss - self.loss)
        self.agreement += share * (agrees.float().mean().item() - self.agreement)
        self.overlap += share * (overlap.mean().item() - self.overlap)
        self.num_tokens += len(q)
        self._agrees.extend(_runs(agrees, text.counted))
        self._overlaps.extend(_runs(overlap, text.counted))

    def mean_acceptance_length(self, num_draft_tokens: int, sampled: bool = False) -> float:
        """Tokens a verify step commits, greedily or sampled: the text is walked as decoding would."""
        return mean_acceptance_length(self._overlaps if sampled else self._agrees, num_draft_tokens)


@dataclass(frozen=True)
class _Text:
    """What the model says about a batch, once for all exits."""

    counted: Tensor  # (batch, length - start) bool, tokens that count
    start: int
    token_ids: Tensor  # (number,) those tokens
    target: Tensor  # (number, vocab) p
    chosen: Tensor  # (number,) its most probable tokens
    warp: Callable[[Tensor], Tensor]

    @classmethod
    def read(
        cls, logits: Tensor, token_ids: Tensor, start: int, labels: Tensor | None, warp: Callable[[Tensor], Tensor]
    ) -> _Text:
        """From the model's logits (batch, length, vocab) over tokens (batch, length), of which [start:) count but where
        `labels`, (batch, length) as well, is -100."""
        counted = torch.ones_like(token_ids, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
        counted = counted[:, start:]
        p = logits[:, start - 1 : -1][counted].float()  # (number, vocab)
        chosen = p.argmax(-1)
        return cls(counted, start, token_ids[:, start:][counted], warp(p).softmax(-1), chosen, warp)

    def of(self, logits: Tensor) -> Tensor:
        """The (number, vocab) float32 rows of (batch, length, vocab) that predict what is counted."""
        return logits[:, self.start - 1 : -1][self.counted].float()


def _warper(temperature: float, top_p: float) -> Callable[[Tensor], Tensor]:
    """Logits (number, vocab) to those that are sampled from, by transformers' own processors."""
    steps: list[Callable[..., Tensor]] = []
    if temperature != 1:
        steps.append(TemperatureLogitsWarper(float(temperature)))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))

    def warp(logits: Tensor) -> Tensor:
        for step in steps:
            logits = step(None, logits)
        return logits

    return warp


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
    temperature: float = 1.0,
    top_p: float = 1.0,
    draft_vocabulary: Tensor | None = None,
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
        temperature: above 0, of the sampling that `overlap` is about; loss and agreement do not depend on it.
        top_p: the same: only the most probable tokens that make up this share.
        draft_vocabulary: (n,) ascending token ids; exits are then measured with a head cut to them as well.

    Returns:
        A measurement for each exit, and one under key L for the model itself.

    Raises:
        ValueError: if there is no batch.
    """
    inner = unwrap(model)
    last = num_layers(inner)
    exits = range(1, last) if exits is None else exits
    measured = {exit_layer: ExitMeasurement() for exit_layer in (*sorted(set(exits)), last)}
    warp, kept = _warper(temperature, top_p), None if draft_vocabulary is None else draft_vocabulary.to(inner.device)
    for exit_layer in exits if kept is not None else ():
        measured[exit_layer].cut = ExitMeasurement()
    training = inner.training
    inner.eval()
    try:
        reader = ExitReader(inner, exits)
        for batch in batches:
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            token_ids, labels = inputs["input_ids"], inputs.get("labels")
            logits, exit_logits = reader.read(token_ids, inputs.get("position_ids"))
            text = _Text.read(logits, token_ids, start, labels, warp)
            measured[last]._add(logits, text)
            for exit_layer, early in exit_logits:
                own = measured[exit_layer]
                own._add(early, text)
                if own.cut is not None:
                    own.cut._add(early, text, kept)
    finally:
        inner.train(training)
    if not measured[last].num_tokens:
        raise ValueError("no text to measure exits on: give at least one batch of two tokens or more")
    return measured


@dataclass(frozen=True)
class Forecast:
    """A setting and what it should bring.

    Attributes:
        speedup: over plain decoding in the same loop; 1 is no gain.
        draft_vocabulary: whether the exit's head is cut to the draft vocabulary, where there is one.
    """

    exit_layer: int
    num_draft_tokens: int
    mean_acceptance_length: float
    speedup: float
    draft_vocabulary: bool = True


def best_setting(
    measured: dict[int, ExitMeasurement], costs: Costs, max_draft_tokens: int = 8, sampled: bool = False
) -> list[Forecast]:
    """Every (exit layer, draft length) that both have seen, best first; for greedy decoding, or for sampling as the
    exits were measured. Where exits were measured and timed with a draft vocabulary too, with and without it."""
    forecasts = []
    for exit_layer in costs.draft:
        whole, cut = measured[exit_layer], measured[exit_layer].cut if exit_layer in costs.cut_draft else None
        for measurement in (whole,) if cut is None else (whole, cut):
            for n in range(1, max_draft_tokens + 1):
                length = measurement.mean_acceptance_length(n, sampled)
                if length == length:  # not nan: text too short
                    speedup = costs.step * length / costs.round(exit_layer, n, measurement is cut)
                    forecasts.append(Forecast(exit_layer, n, length, speedup, cut is None or measurement is cut))
    return sorted(forecasts, key=lambda forecast: -forecast.speedup)
