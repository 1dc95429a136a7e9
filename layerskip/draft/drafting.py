"""What proposes: the early exit, which grows a tree depth by depth, and prompt lookup.

A chain is the tree of width one. How wide and how deep a tree grows depends on the committed tokens and the draft's
distributions alone, never on the value of a token that was drawn and is then left out: that would bias the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerskip.exact.policy import Policy
from layerskip.exact.rules import Proposal
from layerskip.model.cache import RollbackCache
from layerskip.model.rows import Rows
from layerskip.model.stages import Stages
from layerskip.model.tree import Draft, Growth, Shape, chain_links

# scores (B, 1, vocab) of the next token of a chain -> (B,) bool, whether it is worth drafting
Confident = Callable[[Tensor], Tensor]
Branches = Sequence[Sequence[int]]  # tokens that may follow each row's root, found elsewhere; none is []


def draft_nothing(rows: Rows) -> Draft:
    """No proposal: verification then is plain decoding."""
    if len(rows) == 1:
        return chain_of(rows, rows.roots[:, :0])
    return Growth(rows).draft(None)


def chain_of(rows: Rows, tokens: Tensor, hidden: Tensor | None = None, probabilities: Tensor | None = None) -> Draft:
    """The record of a chain (1, N) of a single row."""
    parents, valid, depths = chain_links(tokens.shape[1], tokens.device)
    return Draft(tokens, parents, valid, depths, probabilities, hidden, is_chain=True)


def draft_chain(
    stages: Stages,
    cache: RollbackCache,
    rows: Rows,
    policy: Policy,
    num_draft_tokens: int,
    confident: Confident | None = None,
) -> Draft:
    """Draft a chain of a single row with layers [0:E) and the head.

    The last token passes through layers [0:E) too, without the head: verification needs its hidden state.
    """
    current, tokens, distributions, hiddens = rows.roots, [], [], []
    depths = chain_links(num_draft_tokens, rows.device)[2]
    drafted = rows.roots[:, :0]  # (1, i)
    for depth in range(num_draft_tokens):
        logits, hidden = stages.draft(current, cache, 1)
        assert logits is not None
        hiddens.append(hidden)
        scores = policy.scores(logits, rows, drafted, depth)
        if confident is not None and not confident(scores):
            break
        proposal = policy.propose(scores, 1, rows, depths[:, depth : depth + 1])
        current = proposal.tokens[..., 0]  # (1, 1)
        tokens.append(current)
        if proposal.probabilities is not None:
            distributions.append(proposal.probabilities)
        drafted = torch.cat(tokens, dim=1)
    else:
        hiddens.append(stages.draft(current, cache)[1])
    q = torch.cat(distributions, dim=1) if distributions else None
    return chain_of(rows, drafted, torch.cat(hiddens, dim=1), q)


def draft_tree(
    stages: Stages,
    cache: RollbackCache,
    rows: Rows,
    policy: Policy,
    shape: Shape,
    confident: Confident | None = None,
    branches: Branches | None = None,
) -> Draft:
    """Draft trees for all rows, every depth in one pass through layers [0:E).

    Args:
        confident: asked at chains, before a token is drawn: rows that are not drafted for any further.
        branches: drafts from elsewhere, which become branches of the trees.
    """
    growth, hiddens, distributions = Growth(rows), [], []
    level, weights = slice(0, 1), rows.roots.new_zeros(len(rows), 1, dtype=torch.float32)  # (B, n) of their paths
    path_weights = []
    deterministic = shape.is_dynamic or branches is not None
    going = torch.ones(len(rows), 1, dtype=torch.bool, device=rows.device)
    for width in shape.widths:
        logits, hidden = stages.draft(growth.tokens[:, level], cache, level.stop - level.start, growth.block(level))
        assert logits is not None
        hiddens.append(hidden)
        scores = policy.scores(logits, rows, growth, level.start)
        if confident is not None and shape.is_chain:
            going = going & confident(scores)[:, None]
            if not going.any():
                break
        proposal = policy.propose(scores, width, rows, growth.depths[:, level], deterministic)
        if proposal.probabilities is not None:
            distributions.append(proposal.probabilities)
        level, weights = _grow(growth, proposal, level, weights, width if shape.is_dynamic else None, going)
        path_weights.append(weights)
    else:
        level = slice(level.start, _graft(growth, branches or ()))
        hiddens.append(stages.draft(growth.tokens[:, level], cache, 0, growth.block(level))[1])
    hidden = torch.cat(hiddens, dim=1)
    if shape.num_tree_tokens is not None and branches is None and len(growth) - 1 > shape.num_tree_tokens:
        return growth.best(torch.cat(path_weights, dim=1), shape.num_tree_tokens, hidden)
    return growth.draft(hidden, torch.cat(distributions, dim=1) if distributions else None)


def _grow(
    growth: Growth, proposal: Proposal, level: slice, weights: Tensor, keep: int | None, going: Tensor
) -> tuple[slice, Tensor]:
    """Add children below the nodes of a level: all, or of each row the `keep` whose paths are most probable."""
    batch, n, k = proposal.tokens.shape
    tokens, valid = proposal.tokens.view(batch, n * k), proposal.valid.view(batch, n * k)
    parents = torch.arange(level.start, level.stop, device=tokens.device).repeat_interleave(k).expand(batch, -1)
    weights = (weights[..., None] + proposal.log_weights).view(batch, n * k)
    if keep is not None and keep < n * k:
        best = weights.topk(keep, dim=1).indices.sort(dim=1).values  # (B, keep), siblings in the order they are tried
        tokens, valid, parents, weights = (x.gather(1, best) for x in (tokens, valid, parents, weights))
    return growth.add(tokens, parents, valid & going), weights


def _graft(growth: Growth, branches: Branches) -> int:
    """Add each row's branch below its root, along the nodes that say the same already; returns the number of nodes."""
    rests: list[tuple[int, list[int]]] = []  # (node, tokens to add below it)
    for row, branch in enumerate(branches):
        tokens, parents = growth.tokens[row].tolist(), growth.parents[row].tolist()
        children = {(parents[i], tokens[i]): i for i in range(len(tokens) - 1, 0, -1)}
        node, rest = 0, list(branch)
        while rest and (node, rest[0]) in children:
            node = children[node, rest.pop(0)]
        rests.append((node, rest))
    for depth in range(max((len(rest) for _, rest in rests), default=0)):
        below = [node if depth == 0 else len(growth) - 1 for node, _ in rests]
        tokens = [rest[depth] if depth < len(rest) else 0 for _, rest in rests]
        valid = [depth < len(rest) for _, rest in rests]
        as_column = [torch.tensor(values, device=growth.tokens.device)[:, None] for values in (tokens, below, valid)]
        growth.add(*as_column)
    return len(growth)


def draft_found(rows: Rows, branches: Branches) -> Draft:
    """The record of what was found for each row, a chain each: layers [0:E) have not run."""
    if len(rows) == 1:
        return chain_of(rows, torch.tensor([branches[0]], dtype=torch.long, device=rows.device))
    growth = Growth(rows)
    _graft(growth, branches)
    return growth.draft(None)
