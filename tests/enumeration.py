"""The exact law of what an accept rule emits: every proposal with its probability, every threshold by bisection.

A "model" is a list of tables: tables[d] is (V,) * (d + 1) float64, the distribution after each prefix of d tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.exact.acceptance import Walk

TOP = 1 - 1e-9  # a uniform that only what is certain accepts
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Walk, Tensor]]  # walk_sampled's arguments
TREES = {  # parents, vocabulary
    "siblings": ([0, 0], 3),
    "three": ([0, 0, 0], 4),
    "pairs": ([0, 0, 1, 1], 3),
    "branches": ([0, 0, 1, 2], 3),
    "mixed": ([0, 0, 1, 0, 3], 3),
    "chain": ([0, 1, 2], 3),
}
Keep = Callable[[tuple[int, ...], tuple[int, ...]], bool]


class Proposal(NamedTuple):
    weight: float
    tokens: tuple[int, ...]
    valid: tuple[bool, ...]


def random_tables(seed: int, vocab: int, depth: int, kind: str = "full") -> list[Tensor]:
    """Tables for `depth` tokens; kind: full, zeros (holes anywhere), top2 (masked to two tokens), sharp (cold)."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for d in range(depth):
        scores = torch.randn((vocab,) * (d + 1), generator=generator, dtype=torch.float64)
        if kind == "sharp":
            scores = scores / 0.2
        if kind == "zeros":
            holes = torch.rand(scores.shape, generator=generator) < 0.4
            holes &= scores < scores.amax(-1, keepdim=True)
            scores = scores.masked_fill(holes, -torch.inf)
        if kind == "top2":
            scores = scores.masked_fill(scores < scores.topk(2, -1).values[..., -1:], -torch.inf)
        tables.append(scores.softmax(-1))
    return tables


def prefixes(parents: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """What each node's path from the root spells."""
    spelled: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents, tokens, strict=False):
        spelled.append((*spelled[parent], token))
    return spelled


def without_replacement(
    parents: Sequence[int], draft: list[Tensor], keep: Keep = lambda prefix, siblings: True
) -> Iterator[Proposal]:
    """Trees whose siblings are drawn from the draft without replacement; where `keep` says no there is no such node.

    `keep` sees the prefix of the parent and the siblings drawn before. Where the draft has no mass left, the least
    token that is no sibling stands in.
    """
    vocab = len(draft[0])

    def grow(tokens: tuple[int, ...], valid: tuple[bool, ...], weight: float) -> Iterator[Proposal]:
        i = len(tokens)
        if i == len(parents):
            yield Proposal(weight, tokens, valid)
            return
        prefix = prefixes(parents, tokens)[parents[i]]
        siblings = tuple(tokens[j] for j in range(i) if parents[j] == parents[i] and valid[j])
        if not keep(prefix, siblings):
            yield from grow((*tokens, 0), (*valid, False), weight)
            return
        chances = draft[len(prefix)][prefix].clone()
        chances[list(siblings)] = 0
        if chances.sum() == 0:
            least = min(set(range(vocab)) - set(siblings))
            yield from grow((*tokens, least), (*valid, True), weight)
            return
        for token, chance in enumerate((chances / chances.sum()).tolist()):
            if chance > 0:
                yield from grow((*tokens, token), (*valid, True), weight * chance)

    return grow((), (), 1.0)


def emitted_law(
    rule: Rule, parents: Sequence[int], proposals: Iterator[Proposal], target: list[Tensor], draft: list[Tensor]
) -> tuple[Tensor, float]:
    """The law (V,) * len(target) of the tokens emitted, the target going on where a round ends; mean accepted."""
    listed = list(proposals)
    vocab, n = len(target[0]), len(parents)
    tokens = torch.tensor([proposal.tokens for proposal in listed])  # (R, N)
    valid = torch.tensor([proposal.valid for proposal in listed])  # (R, N)
    p = torch.zeros(len(listed), n + 1, vocab, dtype=torch.float64)
    q = torch.zeros(len(listed), max(parents) + 1, vocab, dtype=torch.float64)
    for row, proposal in enumerate(listed):
        for node, prefix in enumerate(prefixes(parents, proposal.tokens)):
            p[row, node] = target[len(prefix)][prefix]
            if node < q.shape[1]:
                q[row, node] = draft[len(prefix)][prefix]
    tree = torch.tensor(parents).expand(len(listed), n)

    def judge(rows: Tensor, uniforms: Tensor) -> tuple[Walk, Tensor]:
        return rule(tokens[rows], tree[rows], valid[rows], q[rows], p[rows], uniforms)

    rows, uniforms, weights = _cells(judge, torch.tensor([x.weight for x in listed], dtype=torch.float64), n)
    walk, following = judge(rows, uniforms)
    law = torch.zeros((vocab,) * len(target), dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        nodes = walk.path[i, : walk.num_accepted[i]].tolist()
        said = tuple(tokens[row, node - 1].item() for node in nodes)
        law[said] += weights[i] * continued(following[i], said, target)
    return law, float((weights * walk.num_accepted).sum())


def continued(following: Tensor, said: tuple[int, ...], target: list[Tensor]) -> Tensor:
    """`following` as the law of the token after `said`, and the target's of all after that."""
    for depth in range(len(said) + 1, len(target)):
        following = following[..., None] * target[depth][said]
    return following


def law_of(target: list[Tensor]) -> Tensor:
    return continued(target[0], (), target)


def _cells(judge: Callable, weights: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the cube of uniforms where the verdict changes: rows, a point of each cell, and the cell's weight."""
    rows = torch.arange(len(weights))
    uniforms = torch.full((len(weights), n), TOP, dtype=torch.float64)
    for i in range(n):
        at_zero = _verdict(judge, rows, uniforms, i, torch.zeros_like(weights))
        low, high = torch.zeros_like(weights), torch.full_like(weights, TOP)
        for _ in range(36):
            middle = (low + high) / 2
            same = (_verdict(judge, rows, uniforms, i, middle) == at_zero).all(1)
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        low[low > 1 - 1e-8] = 1.0
        below, above = uniforms.clone(), uniforms.clone()
        below[:, i], above[:, i] = 0, TOP
        rows, uniforms = rows.repeat(2), torch.cat([below, above])
        weights = torch.cat([weights * low, weights * (1 - low)])
        rows, uniforms, weights = rows[weights > 0], uniforms[weights > 0], weights[weights > 0]
    return rows, uniforms, weights


def _verdict(judge: Callable, rows: Tensor, uniforms: Tensor, i: int, at: Tensor) -> Tensor:
    """What the rule says with uniform i set to `at`, as rows to compare."""
    tried = uniforms.clone()
    tried[:, i] = at
    walk, following = judge(rows, tried)
    return torch.cat([walk.num_accepted[:, None], walk.last[:, None], (following * 1e9).round()], 1)


def models(parents, vocab: int, seed: int, kinds=("full", "full")):
    """Target and draft tables for as many tokens as a round on this tree can emit."""
    depth = max(len(prefix) for prefix in prefixes(parents, [0] * len(parents)))
    return random_tables(seed, vocab, depth + 1, kinds[0]), random_tables(seed + 1000, vocab, depth + 1, kinds[1])


def random_trees(batch: int, n: int, vocab: int, seed: int):
    """Trees of every shape, siblings sometimes equal, nodes sometimes missing; float32 p and q with zeros."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(shape, generator=generator)  # noqa: E731
    parents = (draw(batch, n) * torch.arange(1, n + 1)).long()  # node 0 .. i
    tokens, valid = (draw(batch, n) * vocab).long(), draw(batch, n) < 0.8
    q, p = draw(batch, n, vocab), draw(batch, n + 1, vocab)
    q, p = (x.masked_fill(draw(*x.shape) < 0.2, 0) + 1e-3 * (x == x.amax(-1, keepdim=True)) for x in (q, p))
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    return tokens, parents, valid, q, p, draw(batch, n)
