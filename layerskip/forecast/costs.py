"""What speculation costs on this machine: the stages, timed alone, and what the loop does besides.

Layers are timed without the loop, and the loop without layers: the difference of two long times would be noise.
Everything is timed again and again in turn, plain steps among it, and of each the median counts: a slow spell of the
machine then hits all alike. (The fastest of several calls flatters short ones, whose weights stay in the caches.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from layerskip.forecast.cost_model import Costs, TreeCosts, level_sizes, num_verified
from layerskip.forecast.stopwatch import Stopwatch
from layerskip.model.anatomy import device_of, unwrap
from layerskip.model.block import Block, place
from layerskip.model.cache import RollbackCache
from layerskip.model.stages import Stages
from layerskip.model.tree import parse_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tree = str | tuple[int, ...]
_DRAFTS = 2  # drafted tokens before a verification that is timed


@torch.inference_mode()
def measure_costs(
    model: nn.Module,
    exits: Sequence[int],
    max_draft_tokens: int = 8,
    context: int = 128,
    repeats: int = 5,
    draft_vocabulary: Tensor | None = None,
    advance: Callable[[int], object] | None = None,
    trees: Sequence[Tree] = (),
    seconds: float = 0.0,
) -> Costs:
    """Time the stages of each exit layer on this machine, in the order decoding calls them: a verification finds the
    caches as drafting left them. Every number of positions is timed: some are slower than larger ones.

    Args:
        context: tokens in the cache, or as many as the model's positions leave room for.
        repeats: of every timing, of which the median counts.
        draft_vocabulary: (n,) ascending token ids; drafts are then timed with the head cut to them as well.
        advance: is told each exit layer when it is done.
        trees: shapes whose passes are timed too.
        seconds: of each exit layer: small models are timed up to four times as often in this time.
    """
    inner = unwrap(model)
    training = inner.training
    inner.eval()
    context = _fitting(inner, context, max_draft_tokens, trees)
    clocks = []
    try:
        whole = Stages(inner, None)
        plain = Stopwatch(device_of(inner))
        cache, token = _filled_cache(whole, context), _tokens(whole, 1)
        for exit_layer in sorted(set(exits)):
            clock = _ExitClock(Stages(inner, exit_layer), cache, context)
            if draft_vocabulary is not None:
                clock.cut = Stages(inner, exit_layer, draft_vocabulary)
            clock.chains(1)
            clock.times.forget()  # that was to warm up
            for _ in _repeats(repeats, seconds, plain.clock):
                plain.add("step", whole.verify, token, None, cache)
                cache.rollback(context)
                clock.chains(max_draft_tokens)
                clock.trees(trees)
            clocks.append(clock)
            if advance is not None:
                advance(exit_layer)
        if not clocks:
            plain.add("step", whole.verify, token, None, cache)
    finally:
        inner.train(training)
    return _costs(plain, clocks)


def _fitting(model: PreTrainedModel, context: int, max_draft_tokens: int, trees: Sequence[Tree]) -> int:
    """`context`, or less where the longest pass would run past the model's last position."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max([max_draft_tokens + 1, *(num_verified(parse_shape(tree)) for tree in trees)])
    return max(1, context if limit is None else min(context, limit - longest))


def _repeats(least: int, seconds: float, clock: Callable[[], float]) -> Iterator[None]:
    """So many at least, and up to four times as many while the time lasts."""
    start = clock()
    for repeat in range(4 * least):
        if repeat >= least and clock() - start >= seconds:
            return
        yield


class _ExitClock:
    """Times the stages of an exit layer, from a cache with `context` tokens, which it leaves as it was."""

    def __init__(self, stages: Stages, cache: RollbackCache, context: int) -> None:
        self.stages, self.cache, self.context = stages, cache, context
        self.cut: Stages | None = None
        self.times = Stopwatch(device_of(stages.model))

    def chains(self, max_draft_tokens: int) -> None:
        """A round of every length; of its drafts a few are enough to know them."""
        stages, token = self.stages, _tokens(self.stages, 1)
        for width in range(1, max_draft_tokens + 2):
            for drafting, name in self._heads():
                for _ in range(min(width - 1, _DRAFTS)):
                    self.times.add(name, drafting.draft, token, self.cache, 1)
            _, hidden = self.times.add("extend", stages.draft, token, self.cache)
            self.cache.rollback(self.context)
            states = hidden.expand(-1, width, -1).contiguous()  # (1, width, hidden)
            self.times.add(f"verify {width}", stages.verify, _tokens(stages, width), states, self.cache)
            self.cache.rollback(self.context)

    def _heads(self) -> list[tuple[Stages, str]]:
        return [(self.stages, "draft"), *([] if self.cut is None else [(self.cut, "cut")])]

    def trees(self, trees: Sequence[Tree]) -> None:
        """The passes of the trees' levels, and their verifications."""
        shapes = [parse_shape(tree) for tree in trees]
        levels = sorted({1, *(nodes for shape in shapes for nodes in level_sizes(shape))} if shapes else ())
        for nodes in levels:
            for drafting, name in self._heads():
                self._pass(f"tree-{name} {nodes}", drafting, nodes, nodes)
            self._pass(f"tree-extend {nodes}", self.stages, nodes, 0)
        for nodes in sorted({num_verified(shape) for shape in shapes}):
            block, tokens = self._side_by_side(nodes), _tokens(self.stages, nodes)
            _, hidden = self.stages.draft(tokens, self.cache)
            self.cache.rollback(self.context)
            self.times.add(f"tree-verify {nodes}", self.stages.verify, tokens, hidden, self.cache, block)
            self.cache.rollback(self.context)

    def _pass(self, name: str, stages: Stages, nodes: int, logits_to_keep: int) -> None:
        block, tokens = self._side_by_side(nodes), _tokens(stages, nodes)
        self.times.add(name, stages.draft, tokens, self.cache, logits_to_keep, block)
        self.cache.rollback(self.context)

    def _side_by_side(self, nodes: int) -> Block:
        """A root and its children, anew for every pass, which makes its masks from it."""
        device = device_of(self.stages.model)
        depths = torch.ones(1, nodes, dtype=torch.long, device=device)
        depths[:, 0] = 0
        ancestors = torch.eye(nodes, dtype=torch.bool, device=device)[None].clone()
        ancestors[..., 0] = True
        return place(torch.tensor([self.context], device=device), depths, ancestors)


def _costs(plain: Stopwatch, clocks: Sequence[_ExitClock]) -> Costs:
    of = {clock.stages.exit_layer or 0: clock.times for clock in clocks}
    cuts = {exit_layer: times for exit_layer, times in of.items() if "cut" in times.seconds}
    trees = {exit_layer: times for exit_layer, times in of.items() if "tree-draft 1" in times.seconds}
    names = ("tree-draft", "tree-cut", "tree-extend", "tree-verify")
    return Costs(
        plain=plain.median("step"),
        draft={exit_layer: times.median("draft") for exit_layer, times in of.items()},
        extend={exit_layer: times.median("extend") for exit_layer, times in of.items()},
        verify={exit_layer: times.table("verify") for exit_layer, times in of.items()},
        cut_draft={exit_layer: times.median("cut") for exit_layer, times in cuts.items()},
        trees={exit_layer: TreeCosts(*(times.table(name) for name in names)) for exit_layer, times in trees.items()},
    )


def _filled_cache(stages: Stages, context: int) -> RollbackCache:
    cache = stages.new_cache(context + 64)
    stages.prefill(_tokens(stages, context), cache)
    return cache


def _tokens(stages: Stages, n: int) -> Tensor:
    vocab_size = stages.model.get_input_embeddings().num_embeddings
    return torch.arange(n, device=device_of(stages.model)).remainder(vocab_size)[None]
