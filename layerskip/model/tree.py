"""Candidate trees: their shapes, how they grow, and the record that verification is given."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.model.block import Block, place
from layerskip.model.rows import Rows

MAX_TREE_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """How wide a tree grows at each depth.

    Attributes:
        widths: children of every node at depth 0, 1, ...; a chain of n tokens is (1,) * n.
        num_tree_tokens: None: the tree is static. Otherwise it is dynamic: at each depth only the most probable
            widths[depth] nodes, by the draft's probability of their whole path, are kept and get children, and of
            all nodes the most probable `num_tree_tokens` are verified (Li et al. 2024, EAGLE-2, 2406.16858, 4.2).
    """

    widths: tuple[int, ...]
    num_tree_tokens: int | None = None

    @property
    def is_chain(self) -> bool:
        return all(width == 1 for width in self.widths)

    @property
    def is_dynamic(self) -> bool:
        return self.num_tree_tokens is not None

    @property
    def num_nodes(self) -> int:
        """Most tokens drafted a round."""
        if self.is_dynamic:
            return sum(self.widths)
        return sum(math.prod(self.widths[: depth + 1]) for depth in range(len(self.widths)))

    def cut(self, depth: int) -> Shape:
        """The same, at most `depth` deep."""
        return self if depth >= len(self.widths) else Shape(self.widths[: max(depth, 0)], self.num_tree_tokens)


def parse_shape(tree: str | Sequence[int]) -> Shape:
    """A shape by name or by its widths: "s4_k2_d6" grows dynamically, 4 deep with 2 branches and 6 tokens verified;
    (3, 2, 1) gives the root three children, each of them two, and each of those one.

    Raises:
        ValueError: with the value and what is understood.
    """
    if isinstance(tree, str):
        found = re.fullmatch(r"s(\d+)_k(\d+)_d(\d+)", tree)
        if found is None:
            raise ValueError(f"tree={tree!r} is no shape: write s4_k2_d6 (steps, branches, tokens), or (3, 2, 1)")
        steps, branches, tokens = map(int, found.groups())
        if not (steps >= 1 and branches >= 1 and steps <= tokens <= steps * branches):
            raise ValueError(
                f"tree={tree!r}: d is the number of tokens verified, from s ({steps}) to s x k ({steps * branches})"
            )
        shape = Shape((branches,) * steps, tokens)
    else:
        widths: tuple[int, ...] = tuple(tree) if isinstance(tree, list | tuple) else ()
        if not widths or not all(type(width) is int and width >= 1 for width in widths):
            raise ValueError(f"tree={tree!r} is no list of widths: whole numbers from 1, one for each depth")
        shape = Shape(widths)
    if shape.num_nodes > MAX_TREE_TOKENS:
        raise ValueError(f"tree={tree!r} has {shape.num_nodes} tokens, more than {MAX_TREE_TOKENS}: make it narrower")
    return shape


@dataclass
class Draft:
    """What verification is given. Node 0 is the root, the last committed token; drafted token i is node i + 1.

    Attributes:
        tokens: (B, N) drafted token ids.
        parents: (B, N) the node each one follows, below its own; children of a node are tried by ascending node.
        valid: (B, N) bool: False where a row has no such node.
        depths: (B, N+1) depth of each node.
        probabilities: (B, M, vocab) float32, the q that the children of nodes 0 .. M-1 were drawn from, without
            replacement; None where tokens are a function of their prefix alone.
        hidden: (B, N+1, hidden_size) exit hidden states of the nodes; None if layers [0:E) did not run.
        block: where the nodes stand; None for a chain of a single row, whose tokens just follow.
        slots: (B, N+1) slot of each node, counted from the row's length; None: the node's own number.
        is_chain: whether all rows have a chain, and all of it.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    depths: Tensor
    probabilities: Tensor | None = None
    hidden: Tensor | None = None
    block: Block | None = None
    slots: Tensor | None = None
    is_chain: bool = False

    def links(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents of all nodes, row by row; the root's token is left at 0."""
        return F.pad(self.tokens, (1, 0)).tolist(), F.pad(self.parents, (1, 0)).tolist()

    def rows(self, rows: list[int]) -> Draft:
        """Of some rows only, what rules look at."""
        q = None if self.probabilities is None else self.probabilities[rows]
        return Draft(self.tokens[rows], self.parents[rows], self.valid[rows], self.depths[rows], q)


@lru_cache(maxsize=64)
def chain_links(num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """parents (1, N), valid (1, N) and depths (1, N+1) of a chain of one row."""
    nodes = torch.arange(num_tokens + 1, device=device)[None]
    return nodes[:, :-1], torch.ones(1, num_tokens, dtype=torch.bool, device=device), nodes


class Growth:
    """The nodes of B trees while they grow; every row has as many, some of them not valid.

    Attributes:
        tokens, parents, valid, depths: (B, m) of all nodes, the root among them.
        ancestors: (B, m, m) bool: what node i sees among the nodes.
    """

    def __init__(self, rows: Rows) -> None:
        batch, device = len(rows), rows.device
        self.rows = rows
        self.tokens = rows.roots  # (B, 1)
        self.parents = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.depths = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.valid = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.ancestors = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
        self._rooms = torch.tensor(rows.rooms, device=device)[:, None]  # (B, 1): what is deeper could not stay

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def add(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> slice:
        """Add (B, n) nodes below (B, n) earlier ones; one below a node that is not valid is not valid either."""
        batch, n = tokens.shape
        first = len(self)
        above = self.ancestors.gather(1, parents[..., None].expand(-1, -1, first))  # (B, n, m)
        own = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(batch, n, n)
        old = torch.cat([self.ancestors, self.ancestors.new_zeros(batch, first, n)], dim=2)
        self.ancestors = torch.cat([old, torch.cat([above, own], dim=2)], dim=1)
        depths = self.depths.gather(1, parents) + 1
        self.valid = torch.cat([self.valid, valid & self.valid.gather(1, parents) & (depths < self._rooms)], dim=1)
        self.depths = torch.cat([self.depths, depths], dim=1)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        return slice(first, first + n)

    def links(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents of all nodes, row by row."""
        return self.tokens.tolist(), self.parents.tolist()

    def block(self, nodes: slice | Tensor = slice(None)) -> Block:
        """Where these nodes stand."""
        block = place(self.rows.lengths, self.depths, self.ancestors, nodes)
        # A row near its end is drafted for as far as the others; what goes too far is cut, and must only be computable.
        block.positions = block.positions.clamp(max=self.rows.limit - 2)
        return block

    def draft(self, hidden: Tensor | None, probabilities: Tensor | None = None) -> Draft:
        """The record of all nodes."""
        return Draft(
            self.tokens[:, 1:],
            self.parents[:, 1:],
            self.valid[:, 1:],
            self.depths,
            probabilities,
            hidden,
            self.block(),
        )

    def best(self, log_probabilities: Tensor, count: int, hidden: Tensor) -> Draft:
        """The record of the root and the `count` most probable nodes by (B, m-1) log probabilities of their paths.

        A node's path is never more probable than its parent's and ties go to the earlier one, so what is kept is a
        tree. Those that are not valid come last.
        """
        ranked = log_probabilities.masked_fill(~self.valid[:, 1:], -torch.inf)
        best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :count]  # (B, count)
        kept = torch.cat([torch.zeros_like(best[:, :1]), best.sort(dim=1).values + 1], dim=1)  # (B, count + 1)
        number = torch.zeros_like(self.parents).scatter(1, kept, torch.arange(count + 1).expand_as(kept).to(kept))
        return Draft(
            tokens=self.tokens.gather(1, kept)[:, 1:],
            parents=number.gather(1, self.parents.gather(1, kept)[:, 1:]),
            valid=self.valid.gather(1, kept)[:, 1:],
            depths=self.depths.gather(1, kept),
            hidden=hidden.gather(1, kept[..., None].expand(-1, -1, hidden.shape[-1])),
            block=self.block(kept),
            slots=kept,
        )
