"""What speculation costs: on paper, and on this machine: the stages, timed alone, and what the loop does besides.

Layers are timed without the loop, and the loop without layers: the difference of two long times would be noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerskip.anatomy import decoder_layers, device_of, unwrap
from layerskip.choice import Choice
from layerskip.session import prepare_session
from layerskip.stages import Stages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IDLE_ROUNDS = 12  # of the loop without layers, in one timing


@dataclass(frozen=True)
class Bookkeeping:
    """Seconds that the loop takes besides running layers: processors, sampling, the rule, stops, the cache.

    Attributes:
        plain: a step of plain decoding.
        draft: a drafted token.
        round: a draft-then-verify round, apart from its drafted tokens.
    """

    plain: float = 0.0
    draft: float = 0.0
    round: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, at one context length and batch 1.

    Attributes:
        plain: one step of the whole model.
        draft: exit -> one drafted token: layers [0:E) and the head.
        extend: exit -> layers [0:E) without the head, which the last draft takes.
        verify: exit -> {positions: layers [E:L) and the head over that many}, linear in between.
        cut_draft: exit -> one drafted token with the head cut to a draft vocabulary; empty where none was given.
        bookkeeping: what the loop adds; all 0 where it was not timed.
    """

    plain: float
    draft: dict[int, float]
    extend: dict[int, float]
    verify: dict[int, dict[int, float]]
    cut_draft: dict[int, float] = field(default_factory=dict)
    bookkeeping: Bookkeeping = Bookkeeping()

    @property
    def step(self) -> float:
        """One step of plain decoding in the same loop."""
        return self.plain + self.bookkeeping.plain

    def round(self, exit_layer: int, num_draft_tokens: int, cut: bool = False) -> float:
        """One draft-then-verify round; `cut`: with the reduced head."""
        draft = (self.cut_draft if cut else self.draft)[exit_layer] + self.bookkeeping.draft
        verify = _interpolate(self.verify[exit_layer], num_draft_tokens + 1)
        return num_draft_tokens * draft + self.extend[exit_layer] + verify + self.bookkeeping.round


def paper_costs(model: nn.Module, exits: Sequence[int], draft_vocabulary: Tensor | None = None) -> Costs:
    """Costs in weights read instead of seconds: what decoding takes where memory is all that limits it, and several
    positions cost no more than one. Forecasts from it are too good, but rank exits without a timing."""
    inner = unwrap(model)
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(inner)]
    output = inner.get_output_embeddings()
    head = 0 if output is None else sum(weight.numel() for weight in output.parameters())
    early = {exit_layer: sum(layers[:exit_layer]) for exit_layer in sorted(set(exits))}
    cut_draft = {}
    if draft_vocabulary is not None and output is not None:
        cut = head * len(draft_vocabulary) / len(output.weight)
        cut_draft = {exit_layer: weights + cut for exit_layer, weights in early.items()}
    return Costs(
        plain=sum(layers) + head,
        draft={exit_layer: weights + head for exit_layer, weights in early.items()},
        extend={exit_layer: float(weights) for exit_layer, weights in early.items()},
        verify={e: dict.fromkeys((1, 2), float(sum(layers[e:]) + head)) for e in early},
        cut_draft=cut_draft,
    )


@torch.inference_mode()
def measure_costs(
    model: nn.Module,
    exits: Sequence[int],
    max_draft_tokens: int = 8,
    context: int = 128,
    repeats: int = 7,
    draft_vocabulary: Tensor | None = None,
    advance: Callable[[int], object] | None = None,
) -> Costs:
    """Time the stages of each exit layer on this machine: the fastest of `repeats` calls after one to warm up,
    since whatever else the machine does can only add to it.

    Args:
        context: tokens in the cache.
        draft_vocabulary: (n,) ascending token ids; drafts are then timed with the head cut to them as well.
        advance: is told each exit layer when it is done.
    """
    inner = unwrap(model)
    training = inner.training
    inner.eval()
    draft, extend, verify, cut_draft = {}, {}, {}, {}
    widths = sorted({1, 2, 3, 1 + max_draft_tokens // 2, 1 + max_draft_tokens})
    try:
        plain = _time_plain(Stages(inner, None), context, repeats)
        for exit_layer in sorted(set(exits)):
            clock = _StageClock(Stages(inner, exit_layer), context, repeats)
            draft[exit_layer], extend[exit_layer] = clock.draft(True), clock.draft(False)
            verify[exit_layer] = {width: clock.verify(width) for width in widths}
            if draft_vocabulary is not None:
                clock.stages = Stages(inner, exit_layer, draft_vocabulary)
                cut_draft[exit_layer] = clock.draft(True)
            if advance is not None:
                advance(exit_layer)
    finally:
        inner.train(training)
    return Costs(plain, draft, extend, verify, cut_draft)


def measure_bookkeeping(model: nn.Module, max_draft_tokens: int = 8, repeats: int = 5, **arguments: Any) -> Bookkeeping:
    """Time the loop around layers that take no time: every draft and verification gives the same logits at once.

    Args:
        model: in eval mode.
        max_draft_tokens: between 1 and this many drafted tokens the time is taken to grow evenly.
        arguments: of `layerskip.generate`: `do_sample`, `temperature`, `top_p` and the like have their price.
    """
    inner = unwrap(model)
    plain = _idle_round(inner, None, 0, repeats, arguments)
    few, many = 1, max(2, max_draft_tokens)
    short, long = (_idle_round(inner, 1, n, repeats, arguments) for n in (few, many))
    draft = max(0.0, (long - short) / (many - few))
    return Bookkeeping(plain, draft, max(0.0, short - few * draft))


class _IdleStages:
    """Stands in for `Stages` in the loop: the same interface, no layers and no cache."""

    def __init__(self, stages: Stages, width: int) -> None:
        self.model = stages.model
        device, dtype = device_of(stages.model), stages.model.dtype
        vocab_size = stages.model.get_input_embeddings().num_embeddings
        peaks = torch.arange(vocab_size, device=device).mul(0.7).sin().mul(8).to(dtype)  # some tokens likely, most not
        self._logits = peaks.expand(1, width, -1).clone()  # (1, width, vocab)
        self._hidden = torch.zeros(1, width, 1, device=device, dtype=dtype)

    def prefill(self, *args: Any) -> None:
        pass

    def draft(self, token_ids: Tensor, cache: Any, logits_to_keep: int = 0, block: Any = None) -> Any:
        return self._logits[:, :1] if logits_to_keep else None, self._hidden[:, : token_ids.shape[1]]

    def verify(self, token_ids: Tensor, hidden: Tensor | None, cache: Any, block: Any = None) -> Tensor:
        return self._logits[:, : token_ids.shape[1]]


def _idle_round(
    model: PreTrainedModel, exit_layer: int | None, num_draft_tokens: int, repeats: int, arguments: dict[str, Any]
) -> float:
    """Seconds a round."""
    # Draft and target say the same, so that every draft is accepted and every round as long as it may be.
    arguments = {**arguments, "max_new_tokens": _IDLE_ROUNDS * (num_draft_tokens + 1), "eos_token_id": None}
    drafting = {"exit_layer": exit_layer, "num_draft_tokens": num_draft_tokens}
    prompt = torch.zeros(1, 2, dtype=torch.long, device=device_of(model))
    arguments["attention_mask"] = torch.ones_like(prompt)
    session = prepare_session(model, prompt, drafting, Choice(), **arguments)
    idle: Any = _IdleStages(session.stages, num_draft_tokens + 1)
    session = replace(session, stages=idle)
    return _fastest(device_of(idle.model), lambda: list(session.steps()), lambda: None, repeats) / _IDLE_ROUNDS


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
        return _fastest(device_of(self.stages.model), call, lambda: self.cache.rollback(self.context), self.repeats)


def _time_plain(stages: Stages, context: int, repeats: int) -> float:
    cache, token = _filled_cache(stages, context), _tokens(stages, 1)
    call = partial(stages.verify, token, None, cache)
    return _fastest(device_of(stages.model), call, lambda: cache.rollback(context), repeats)


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
    return torch.arange(n, device=device_of(stages.model)).remainder(vocab_size)[None]


def _interpolate(table: dict[int, float], x: int) -> float:
    """Linear between the two nearest measured points, and beyond the last two."""
    if x in table:
        return table[x]
    points = sorted(table)
    right = next((i for i, point in enumerate(points) if point > x), len(points) - 1)
    low, high = points[max(right - 1, 0)], points[max(right, 1)]
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)
