"""The samplers of a batch: what one does for a row, done for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerskip.exact.acceptance import Walk
from layerskip.exact.rules import Coupled, Places, Proposal
from layerskip.exact.sampling import Sampler
from layerskip.model.rows import Rows
from layerskip.model.tree import Draft, Growth


class Policy:
    """The samplers of all rows. Rows that share one are processed together.

    Args:
        samplers: one for all rows, or one for each row of the batch.
    """

    def __init__(self, samplers: Sampler | Sequence[Sampler]) -> None:
        self.samplers = samplers

    def groups(self, rows: Rows) -> list[tuple[Sampler, list[int]]]:
        """Samplers, and which of the rows still going are theirs."""
        if isinstance(self.samplers, Sampler):
            return [(self.samplers, list(range(len(rows))))]
        grouped: dict[int, tuple[Sampler, list[int]]] = {}
        for row, index in enumerate(rows.index):
            sampler = self.samplers[index]
            grouped.setdefault(id(sampler), (sampler, []))[1].append(row)
        return list(grouped.values())

    def scores(self, logits: Tensor, rows: Rows, drafted: Tensor | Growth | Draft, first_node: int = 0) -> Tensor:
        """(B, n, vocab) logits of nodes first_node .. first_node + n - 1 to float32 scores, each node with its own
        prefix.

        Args:
            drafted: the nodes; or of a chain of a single row, its drafted tokens (1, >= first_node + n - 1).
        """
        n = logits.shape[1]
        groups = self.groups(rows)
        parts = []
        links: list[tuple[list[list[int]], list[list[int]]]] = []  # asked for once, and only if a prefix is
        for sampler, members in groups:

            def prefix(i: int, members: list[int] = members) -> Tensor:
                row = members[i // n]
                node = first_node + i % n
                if isinstance(drafted, Tensor):
                    return torch.cat([rows.committed(row), drafted[:, :node]], dim=1)
                if not links:
                    links.append(drafted.links())
                below = torch.tensor([path(*links[0], row, node)], dtype=torch.long, device=rows.device)
                return torch.cat([rows.committed(row), below], dim=1)

            part = logits if len(groups) == 1 else logits[members]
            parts.append(sampler.process(part, prefix))
        return parts[0] if len(groups) == 1 else _merge(parts, groups)

    def propose(self, scores: Tensor, k: int, rows: Rows, depths: Tensor, deterministic: bool = False) -> Proposal:
        """k children of each node (B, n) at these depths. See `Rule.propose`."""
        groups = self.groups(rows)
        if len(groups) == 1:
            return groups[0][0].rule.propose(scores, k, Places(rows.index, rows.lengths, depths), deterministic)
        proposals = [
            sampler.rule.propose(scores[m], k, _places(rows, depths, m), deterministic) for sampler, m in groups
        ]
        # Rows that choose by rule never look at theirs.
        q = [
            torch.zeros_like(scores[m]) if p.probabilities is None else p.probabilities
            for p, (_, m) in zip(proposals, groups, strict=True)
        ]
        drawn = any(proposal.probabilities is not None for proposal in proposals)
        return Proposal(
            _merge([proposal.tokens for proposal in proposals], groups),
            _merge([proposal.valid for proposal in proposals], groups),
            _merge([proposal.log_weights for proposal in proposals], groups),
            _merge(q, groups) if drawn else None,
        )

    def forget(self, rows: Rows) -> None:
        """After a round: what was chosen for is done with."""
        for sampler, members in self.groups(rows):
            if isinstance(sampler.rule, Coupled):
                sampler.rule.forget([rows.index[m] for m in members], [rows.in_cache[m] + 1 for m in members])

    def accept(self, draft: Draft, scores: Tensor, rows: Rows) -> tuple[Walk, Tensor]:
        """See `Rule.accept`: of all rows."""
        groups = self.groups(rows)
        if len(groups) == 1:
            return groups[0][0].rule.accept(draft, scores, Places(rows.index, rows.lengths, draft.depths))
        walks, following = [], []
        for sampler, m in groups:
            walk, token = sampler.rule.accept(draft.rows(m), scores[m], _places(rows, draft.depths, m))
            walks.append(walk)
            following.append(token)
        longest = max(walk.path.shape[1] for walk in walks)
        paths = [torch.nn.functional.pad(walk.path, (0, longest - walk.path.shape[1])) for walk in walks]
        return (
            Walk(
                _merge([walk.num_accepted for walk in walks], groups),
                _merge(paths, groups),
                _merge([walk.last for walk in walks], groups),
            ),
            _merge(following, groups),
        )


def _places(rows: Rows, depths: Tensor, members: list[int]) -> Places:
    return Places([rows.index[row] for row in members], rows.lengths[members], depths[members])


def path(tokens: list[list[int]], parents: list[list[int]], row: int, node: int) -> list[int]:
    """The drafted tokens from the root's child down to a node."""
    found = []
    while node:
        found.append(tokens[row][node])
        node = parents[row][node]
    return found[::-1]


def _merge(parts: Sequence[Tensor], groups: Sequence[tuple[Sampler, list[int]]]) -> Tensor:
    """Tensors of the groups' rows to one of all rows."""
    order = torch.tensor([row for _, members in groups for row in members], device=parts[0].device)
    return torch.cat(list(parts))[order.argsort()]
