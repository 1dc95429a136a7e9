"""The exact rules: which drafted tokens stay, and from what the next token is drawn. Pure tensors, no model.

Chain, sampled (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1). Target p, draft q. Drafted
token x_i ~ q_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)). At the first rejection one token is
drawn from the residual (p_i - q_i)_+ / sum (p_i - q_i)_+; if all N are accepted, one from p_{N+1} (the bonus).

Condition. x_i was drawn from exactly the q_i used here; the uniforms are independent of the draft, and the last
draw of both; how many tokens are drafted never depends on the value of a token that is then left out.

Proof, one position. The emitted token is y with probability
    q(y) min(1, p(y)/q(y)) + Pr[reject] r(y),   r = (p - q)_+ / sum (p - q)_+
and Pr[reject] = 1 - sum min(p, q) = sum (p - q)_+, so this is min(p, q)(y) + (p - q)_+(y) = p(y). Position i+1
is looked at only if x_1 .. x_i stayed, so by induction the committed tokens are distributed as the target's.

Greedy decoding is the same rule for p and q that put all mass on their most probable token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """What a rule decides for each row.

    Attributes:
        num_accepted: (batch,) drafted tokens that stay, 0 .. N.
        next_probabilities: (batch, vocab) float32 distribution of the one token that follows them: the residual
            after a rejection, p after a full acceptance. Sums to 1.
    """

    num_accepted: Tensor
    next_probabilities: Tensor


def accept_sampled(
    tokens: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor, uniforms: Tensor
) -> Verdict:
    """Leviathan's rule for a chain of sampled drafts.

    Args:
        tokens: (batch, N) drafted token ids, tokens[:, i] drawn from draft_probabilities[:, i].
        draft_probabilities: (batch, N, vocab) float32, q.
        target_probabilities: (batch, N+1, vocab) float32, p.
        uniforms: (batch, N) on [0, 1), independent of everything else.
    """
    batch, n = tokens.shape
    p_token = target_probabilities[:, :n].gather(2, tokens[..., None]).squeeze(2)  # (batch, N)
    q_token = draft_probabilities.gather(2, tokens[..., None]).squeeze(2)  # (batch, N)
    # u < p/q written without the division; q_token > 0 because the token was drawn from q.
    accepted = uniforms * q_token < p_token  # (batch, N)
    num_accepted = leading_true(accepted)  # (batch,)
    rows = torch.arange(batch, device=tokens.device)
    p_next = target_probabilities[rows, num_accepted]  # (batch, vocab)
    if n == 0:
        return Verdict(num_accepted, p_next)
    q_next = draft_probabilities[rows, num_accepted.clamp(max=n - 1)]  # (batch, vocab)
    rejected = (num_accepted < n)[:, None]  # (batch, 1)
    return Verdict(num_accepted, torch.where(rejected, residual(p_next, q_next), p_next))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)_+ normalised over the last dimension.

    Where p <= q everywhere, p equals q up to rounding and a rejection has probability zero in exact
    arithmetic; the residual is then p itself, never a division by zero.
    """
    excess = (p - q).clamp(min=0)
    mass = excess.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def accept_greedy(tokens: Tensor, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for p and q with one token each.

    Args:
        tokens: (batch, N) drafted token ids.
        target_tokens: (batch, N+1) the target's most probable tokens.

    Returns:
        num_accepted (batch,), and the one token that follows (batch, 1).
    """
    num_accepted = leading_true(tokens == target_tokens[:, :-1])
    return num_accepted, target_tokens.gather(1, num_accepted[:, None])


def leading_true(flags: Tensor) -> Tensor:
    """How many leading entries of each row of (batch, N) booleans are true: (batch,) int64."""
    return flags.to(torch.int64).cumprod(dim=1).sum(dim=1)
