"""How tokens are chosen from scores, by draft and target alike: one rule, two questions.

`propose` picks the k children of each node from the draft's scores; `accept` says which drafted tokens stay and what
follows them, from the target's. What makes each exact is proved in `acceptance.py`.

Scores are float32 logits after the processors, (R, n, vocab).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.exact.acceptance import Walk, accept_greedy, chain_walk, walk_chosen, walk_sampled
from layerskip.exact.block_verification import walk_block
from layerskip.exact.noise import Noise
from layerskip.model.tree import Draft


class Proposal(NamedTuple):
    """Children of n nodes in each of R rows.

    Attributes:
        tokens: (R, n, k) token ids, in the order they are tried.
        valid: (R, n, k) bool: False where there was nothing left to propose.
        log_weights: (R, n, k) how promising each is: log probability below its parent.
        probabilities: (R, n, vocab) float32 what they were drawn from; None if they are a function of the scores.
    """

    tokens: Tensor
    valid: Tensor
    log_weights: Tensor
    probabilities: Tensor | None


class Places(NamedTuple):
    """Where the n nodes of R rows are.

    Attributes:
        row_index: which rows of the batch they are.
        lengths: (R,) positions before each row's root.
        depths: (R, n) of the nodes.
    """

    row_index: Sequence[int]
    lengths: Tensor
    depths: Tensor

    @property
    def positions(self) -> Tensor:
        """(R, n) positions of the tokens that follow the nodes."""
        return self.lengths[:, None] + self.depths + 1


class Rule(Protocol):
    """One way to choose tokens."""

    def propose(self, scores: Tensor, k: int, places: Places, deterministic: bool) -> Proposal: ...

    def accept(self, draft: Draft, scores: Tensor, places: Places) -> tuple[Walk, Tensor]:
        """Which drafted tokens stay, and (R,) the token that follows them."""
        ...


class Greedy:
    """The most probable token; children are the k most probable."""

    def propose(self, scores: Tensor, k: int, places: Places, deterministic: bool) -> Proposal:
        return most_promising(scores, k)

    def accept(self, draft: Draft, scores: Tensor, places: Places) -> tuple[Walk, Tensor]:
        return follow(draft, scores.argmax(dim=-1))


class Rejection:
    """Children are drawn from q without replacement and accepted by recursive rejection; Leviathan's rule in a chain.

    Where children are a function of their prefix (prompt lookup, dynamic trees), a token is drawn from p at each node
    and followed if it is a child.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator  # None: torch's global one

    def propose(self, scores: Tensor, k: int, places: Places, deterministic: bool) -> Proposal:
        if deterministic:
            return most_promising(scores, k)
        q = scores.softmax(dim=-1)
        # Where a draft vocabulary and a processor leave nothing to say, any distribution will do.
        q = torch.where(q.isnan(), 1 / q.shape[-1], q)
        if k == 1:
            tokens = self.draw(q)[..., None]
        else:  # Gumbel-top-k: in descending order they are draws without replacement
            k = min(k, q.shape[-1])
            exponentials = torch.empty_like(q).exponential_(generator=self.generator)
            tokens = (q / exponentials).topk(k, dim=-1).indices
        chances = q.gather(-1, tokens)
        return Proposal(tokens, chances > 0, chances.log(), q)

    def accept(self, draft: Draft, scores: Tensor, places: Places) -> tuple[Walk, Tensor]:
        p = scores.softmax(dim=-1)  # (R, N+1, vocab)
        if not draft.is_chain:  # after what is not valid processors may leave nothing; it is never asked
            void = F.pad(~draft.valid, (1, 0))[..., None]
            p = torch.where(void, 1 / p.shape[-1], p)
        if draft.probabilities is None:
            return follow(draft, self.draw(p))
        uniforms = torch.rand(draft.tokens.shape, device=p.device, generator=self.generator)
        walk, following = self.walk(draft, draft.probabilities, p, uniforms)
        return walk, self.draw(following)

    def walk(self, draft: Draft, q: Tensor, p: Tensor, uniforms: Tensor) -> tuple[Walk, Tensor]:
        return walk_sampled(draft.tokens, draft.parents, draft.valid, q, p, uniforms)

    def draw(self, probabilities: Tensor) -> Tensor:
        """One sample of each (..., vocab) distribution."""
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])


class BlockVerification(Rejection):
    """Drawn like `Rejection`, but a chain is accepted as a whole: never fewer tokens on average."""

    def walk(self, draft: Draft, q: Tensor, p: Tensor, uniforms: Tensor) -> tuple[Walk, Tensor]:
        return walk_block(draft.tokens, draft.valid, q, p, uniforms)


class Coupled:
    """Draft and target choose with the same noise, keyed by seed and position (Gumbel-max): what is committed is what
    plain sampling with that noise commits, token for token, whatever was drafted."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = seeds  # of each row of the batch
        self._noise: Noise | None = None

    def propose(self, scores: Tensor, k: int, places: Places, deterministic: bool) -> Proposal:
        return most_promising(self._perturbed(scores, places), k)

    def accept(self, draft: Draft, scores: Tensor, places: Places) -> tuple[Walk, Tensor]:
        return follow(draft, self._perturbed(scores, places).argmax(dim=-1))

    def _perturbed(self, scores: Tensor, places: Places) -> Tensor:
        if self._noise is None:
            self._noise = Noise(self.seeds, scores.shape[-1], scores.device)
        noise = [
            torch.stack([self._noise.at(row, position) for position in at])
            for row, at in zip(places.row_index, places.positions.tolist(), strict=True)
        ]
        return scores.log_softmax(dim=-1) + torch.stack(noise)  # (R, n, vocab)

    def forget(self, index: Sequence[int], positions: Sequence[int]) -> None:
        """Free the noise of rows before these positions."""
        if self._noise is not None:
            for row, position in zip(index, positions, strict=True):
                self._noise.forget_before(row, position)


def most_promising(scores: Tensor, k: int) -> Proposal:
    """The k highest of (R, n, vocab) scores."""
    if k == 1:  # what a chain asks for, at a fraction of the price
        tokens = scores.argmax(dim=-1, keepdim=True)
        nothing = tokens.new_zeros(tokens.shape, dtype=torch.float32)
        return Proposal(tokens, torch.ones_like(tokens, dtype=torch.bool), nothing, None)
    weights, tokens = scores.log_softmax(dim=-1).topk(min(k, scores.shape[-1]), dim=-1)
    return Proposal(tokens, weights > -torch.inf, weights, None)


def follow(draft: Draft, chosen: Tensor) -> tuple[Walk, Tensor]:
    """From the root along the children that are what the target chose after their parent: (R, N+1)."""
    if draft.is_chain:  # no loop over its depth
        num_accepted, following = accept_greedy(draft.tokens, chosen)
        return chain_walk(num_accepted, draft.tokens.shape[1]), following[:, 0]
    walk = walk_chosen(draft.tokens, draft.parents, draft.valid, chosen)
    return walk, chosen.gather(1, walk.last[:, None])[:, 0]
