"""What a round costs, from what its parts cost; on paper, the parts are weights that are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from layerskip.model.adapters import adapter_at
from layerskip.model.anatomy import decoder_layers, unwrap
from layerskip.model.tree import Shape, parse_shape

DraftShape = int | str | tuple[int, ...]  # a chain's length, or a tree as `Setting.tree` names it
ByWidth = dict[int, float]  # seconds by how many tokens a pass has; linear in between


@dataclass(frozen=True)
class Bookkeeping:
    """Seconds that the loop takes besides running layers: processors, sampling, the rule, stops, the cache.

    Attributes:
        plain: a step of plain decoding.
        draft: a drafted token of a chain.
        round: a draft-then-verify round of a chain, apart from its drafted tokens.
        trees: tree, by `tree_name` -> a round of it.
    """

    plain: float = 0.0
    draft: float = 0.0
    round: float = 0.0
    trees: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TreeCosts:
    """Seconds of passes whose tokens stand side by side, with a mask of their own, for one exit layer.

    Attributes:
        draft: layers [0:E) and the head, by nodes of a level.
        cut_draft: the same with the head cut to a draft vocabulary; empty where none was given.
        extend: layers [0:E) without the head, by nodes of the last level.
        verify: layers [E:L) and the head, by nodes that are verified, the root among them.
    """

    draft: ByWidth
    cut_draft: ByWidth
    extend: ByWidth
    verify: ByWidth


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
        trees: exit -> what trees take; empty where they were not timed.
    """

    plain: float
    draft: dict[int, float]
    extend: dict[int, float]
    verify: dict[int, ByWidth]
    cut_draft: dict[int, float] = field(default_factory=dict)
    bookkeeping: Bookkeeping = Bookkeeping()
    trees: dict[int, TreeCosts] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """One step of plain decoding in the same loop."""
        return self.plain + self.bookkeeping.plain

    def round(self, exit_layer: int, draft: DraftShape, cut: bool = False) -> float:
        """One draft-then-verify round; `cut`: with the reduced head.

        A tree of levels of n_1, n_2, ... nodes, of which m are verified, takes
        draft(1) + draft(n_1) + ... + extend(n_last) + verify(m + 1), and what the loop adds.
        """
        return self.layers(exit_layer, draft, cut) + self.loop(draft)

    def layers(self, exit_layer: int, draft: DraftShape, cut: bool = False) -> float:
        """Of a round, what layers and head take: what it would take at least."""
        if isinstance(draft, int):
            one = (self.cut_draft if cut else self.draft)[exit_layer]
            return draft * one + self.extend[exit_layer] + interpolate(self.verify[exit_layer], draft + 1)
        costs, shape = self.trees[exit_layer], parse_shape(draft)
        levels = level_sizes(shape)
        passes = costs.cut_draft if cut else costs.draft
        drafts = sum(interpolate(passes, nodes) for nodes in (1, *levels[:-1]))
        return drafts + interpolate(costs.extend, levels[-1]) + interpolate(costs.verify, num_verified(shape))

    def loop(self, draft: DraftShape) -> float:
        """Of a round, what the loop takes besides."""
        if isinstance(draft, int):
            return draft * self.bookkeeping.draft + self.bookkeeping.round
        return self.bookkeeping.trees.get(tree_name(draft), 0.0)


def tree_name(tree: str | Sequence[int]) -> str:
    """A tree as it is written in flags: s3_k2_d6, or 2,1,1."""
    return tree if isinstance(tree, str) else ",".join(map(str, tree))


def level_sizes(shape: Shape) -> list[int]:
    """Most nodes at each depth below the root."""
    if shape.is_dynamic:
        return list(shape.widths)
    return [math.prod(shape.widths[: depth + 1]) for depth in range(len(shape.widths))]


def num_verified(shape: Shape) -> int:
    """Nodes that are verified a round, the root among them."""
    return 1 + min(shape.num_nodes, shape.num_tree_tokens or shape.num_nodes)


def paper_costs(
    model: nn.Module, exits: Sequence[int], draft_vocabulary: Tensor | None = None, trees: bool = False
) -> Costs:
    """Costs in weights read instead of seconds: what decoding takes where memory is all that limits it, and several
    positions cost no more than one. Forecasts from it are too good, but rank exits without a timing."""
    inner = unwrap(model)
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(inner)]
    output = inner.get_output_embeddings()
    head = 0 if output is None else sum(weight.numel() for weight in output.parameters())
    adapters = {e: adapter_at(inner, e) for e in sorted(set(exits))}
    own = {e: 0 if a is None else sum(weight.numel() for weight in a.parameters()) for e, a in adapters.items()}
    early = {exit_layer: float(sum(layers[:exit_layer]) + weights) for exit_layer, weights in own.items()}
    draft = {exit_layer: weights + head for exit_layer, weights in early.items()}
    verify = {exit_layer: _constant(sum(layers[exit_layer:]) + head) for exit_layer in early}
    cut_draft = {}
    if draft_vocabulary is not None and output is not None:
        cut = head * len(draft_vocabulary) / len(output.weight)
        cut_draft = {exit_layer: weights + cut for exit_layer, weights in early.items()}
    return Costs(
        plain=sum(layers) + head,
        draft=draft,
        extend=early,
        verify=verify,
        cut_draft=cut_draft,
        trees={
            e: TreeCosts(
                _constant(draft[e]), _constant(cut_draft[e]) if cut_draft else {}, _constant(early[e]), verify[e]
            )
            for e in (early if trees else ())
        },
    )


def _constant(value: float) -> ByWidth:
    return dict.fromkeys((1, 2), float(value))


def interpolate(table: ByWidth, x: int) -> float:
    """Linear between the two nearest measured points, and beyond the last two."""
    if x in table:
        return table[x]
    points = sorted(table)
    right = next((i for i, point in enumerate(points) if point > x), len(points) - 1)
    low, high = points[max(right - 1, 0)], points[max(right, 1)]
    return table[low] + (table[high] - table[low]) * (x - low) / (high - low)
