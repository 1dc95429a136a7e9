"""The exact rules: which drafted tokens stay, and from what the next token is drawn. Pure tensors, no model.

A candidate tree, for B rows at once. Node 0 is the root, the last committed token; drafted token i is node i + 1.

    tokens   (B, N) int64    an id of the vocabulary everywhere, also where `valid` is False
    parents  (B, N) int64    node (0 .. i) of token i's parent; a chain has 0, 1, .., N-1
    valid    (B, N) bool     False where a row has no such node: never accepted, no child of anything

Children of a node are verified by increasing index. p, the target, has a distribution at every node; q, the draft, at
every node that has children. Three rules, for three ways to draft:

    walk_chosen    the tree is a function of prefix and draft logits, or shares the target's noise (noise.py); greedy
    walk_sampled   children were sampled from q, without replacement; for a chain, Leviathan et al. 2023, algorithm 1
    walk_block     a sampled chain judged as a whole (block_verification.py); never accepts fewer in expectation

Conditions of the sampled rules. (A) A child was drawn from exactly the q given here, without its earlier siblings.
(B) The uniforms and the draw of the next token are independent of the drafting and of each other. (C) Whether a token
is drafted never depends on its own value or on anything drawn after it: to look at q first is right, to throw a drawn
token away is not. Siblings are in the order they were drawn in (Gumbel-top-k: by falling score); sorted by q they
break (A). Independent draws are draws without replacement once a repeated one is marked not valid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Walk(NamedTuple):
    """The accepted path of each row.

    Attributes:
        num_accepted: (B,) int64, drafted tokens that stay.
        path: (B, D) int64, their nodes in order, 0 beyond num_accepted; max(num_accepted) <= D <= N.
        last: (B,) int64, the node where the row stopped, 0 if nothing was accepted.
    """

    num_accepted: Tensor
    path: Tensor
    last: Tensor


class Verdict(NamedTuple):
    """What a rule decides for each row of a chain.

    Attributes:
        num_accepted: (batch,) drafted tokens that stay, 0 .. N.
        next_probabilities: (batch, vocab) float32 distribution of the one token that follows them: the residual
            after a rejection, p after a full acceptance. Sums to 1.
    """

    num_accepted: Tensor
    next_probabilities: Tensor


def walk_chosen(tokens: Tensor, parents: Tensor, valid: Tensor, chosen: Tensor) -> Walk:
    """From the root to the child that is what the target says, as long as there is one (the first, if several).

    The token that follows is chosen[last].

    Exact if chosen at every node is a draw from p there, independent of the tree. Proof. The first token emitted is
    chosen[0], whether a child has its value or not, so it is distributed as p at the root; the tree decides only
    whether the walk goes on. If it does, at the child c whose path spells what was emitted, the next token emitted
    is chosen[c], drawn from p after that path independently of the tree and of what came before, and so on; where
    the walk ends the next round continues with a fresh draw. So any tree will do that is a function of the prefix
    and the draft's logits, pruned and ordered at will. Greedy decoding is the rule for a p with one token: chosen is
    its argmax. It is recursive rejection with children that were not sampled: q_i puts all mass on x_i.

    Args:
        chosen: (B, N+1) int64, what the target says after each node.
    """
    agrees = valid & (tokens == chosen.gather(1, parents))  # (B, N)
    node = tokens.new_zeros(len(tokens))  # (B,)
    num_accepted, path = node, []
    for _ in range(tokens.shape[1]):
        reached = agrees & (parents == node[:, None])  # (B, N)
        found = reached.any(1)  # (B,)
        if not bool(found.any()):
            break
        child = reached.to(torch.uint8).argmax(1) + 1  # (B,), the first
        node = torch.where(found, child, node)
        path.append(child * found)
        num_accepted = num_accepted + found
    return Walk(num_accepted, torch.stack(path, 1) if path else tokens[:, :0], node)


def walk_sampled(
    tokens: Tensor, parents: Tensor, valid: Tensor, q: Tensor, p: Tensor, uniforms: Tensor
) -> tuple[Walk, Tensor]:
    """Recursive rejection: at each node the children are tried in order, each against what the others left of p.

        P = p at the node
        for each child x_i: accept with probability min(1, P(x_i) / q_i(x_i)) and go on at it, or P = (P - q_i)_+ / sum
        no child left: the next token is drawn from P

    where q_i is q without x_1 .. x_{i-1}, renormalised: what the i-th draw without replacement is distributed as.

    Proof. Claim: started at child i, the token emitted is distributed as P. With no child left it is drawn from P.
    Else it is y with probability q_i(y) min(1, P(y)/q_i(y)) + Pr[reject] P'(y), where P' = (P - q_i)_+ / sum
    (P - q_i)_+ is the same whatever x_i was rejected, so the rest emits P' by induction. As Pr[reject]
    = 1 - sum min(P, q_i) = sum (P - q_i)_+, this is min(q_i, P)(y) + (P - q_i)_+(y) = P(y). Down the tree: a child's
    own children are looked at only if it stayed, so what follows an accepted path is the target's again.

    Where q_i(x_i) = 0, x_i is no draw from q_i (nothing is left of q, or an independent draw repeats a sibling). It is
    passed over and P stays. That is exact as long as the others, given that they are not 0, were drawn from q_i.

    Args:
        q: (B, M, vocab) float32, q[:, m] the draft's distribution at node m; nodes with children have m < M.
        p: (B, N+1, vocab) float32, the target's at every node.
        uniforms: (B, N) on [0, 1), one for each drafted token.

    Returns:
        the walk, and the distribution (B, vocab) of the token that follows it.
    """
    batch, n = tokens.shape
    order = torch.arange(n, device=tokens.device)  # (N,)
    if torch.equal(parents, order.expand_as(parents)):  # a chain has a closed form: no loop over its depth
        num_accepted, next_probabilities = _accept_chain(tokens, valid, q, p, uniforms)
        return chain_walk(num_accepted, n), next_probabilities
    rows = torch.arange(batch, device=tokens.device)  # (B,)
    node = tried = num_accepted = tokens.new_zeros(batch)  # (B,) each; a row's next child has an index > tried
    path = tokens.new_zeros(batch, n + 1)  # one column to spare: every trial writes one
    target, draft, mass = p[:, 0], q[:, 0], q.new_ones(batch)  # (B, V), (B, V), (B,): P, and mass * q_i
    while True:  # one trial a turn, rows at different depths together
        waiting = valid & (parents == node[:, None]) & (order >= tried[:, None])  # (B, N)
        waits = waiting.any(1)  # (B,)
        if not bool(waits.any()):
            return Walk(num_accepted, path[:, :n], node), target
        i = waiting.to(torch.uint8).argmax(1)  # (B,), the first
        token = tokens[rows, i][:, None]  # (B, 1)
        p_token, q_token = target.gather(1, token)[:, 0], draft.gather(1, token)[:, 0]  # (B,), (B,)
        trying = waits & (q_token > 0)  # (B,)
        accepted = trying & (uniforms[rows, i] * q_token < p_token * mass)  # (B,)
        rejected = trying & ~accepted  # (B,)
        any_accepted, any_rejected = torch.stack([accepted, rejected]).any(1).tolist()
        if any_rejected:
            rest = residual(target, draft / mass.clamp(min=torch.finfo(mass.dtype).tiny)[:, None])  # (B, V)
            target = torch.where(rejected[:, None], rest, target)
            draft = draft.scatter(1, token, 0.0)
            # Summed anew, not 1 - sum of the siblings: where these have nearly all the mass, that is rounding.
            mass = torch.where(rejected, draft.sum(1), mass)
        if any_accepted:
            target = torch.where(accepted[:, None], p[rows, i + 1], target)
            draft = torch.where(accepted[:, None], q[rows, (i + 1).clamp(max=q.shape[1] - 1)], draft)
            mass = torch.where(accepted, 1.0, mass)
        tried = torch.where(waits, i + 1, tried)  # a row that has stopped keeps its place
        node = torch.where(accepted, i + 1, node)
        path[rows, num_accepted] = (i + 1) * accepted
        num_accepted = num_accepted + accepted


def accept_sampled(
    tokens: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor, uniforms: Tensor
) -> Verdict:
    """Leviathan's rule for a chain of sampled drafts: walk_sampled where no node has a sibling.

    Args:
        tokens: (batch, N) drafted token ids, tokens[:, i] drawn from draft_probabilities[:, i].
        draft_probabilities: (batch, N, vocab) float32, q.
        target_probabilities: (batch, N+1, vocab) float32, p.
        uniforms: (batch, N) on [0, 1), independent of everything else.
    """
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return _accept_chain(tokens, everywhere, draft_probabilities, target_probabilities, uniforms)


def _accept_chain(tokens: Tensor, valid: Tensor, q: Tensor, p: Tensor, uniforms: Tensor) -> Verdict:
    n = min(tokens.shape[1], q.shape[1])  # no row is longer than q
    if n == 0:
        return Verdict(tokens.new_zeros(len(tokens)), p[:, 0])
    tokens, valid, uniforms = tokens[:, :n], valid[:, :n], uniforms[:, :n]
    p_token = p[:, :n].gather(2, tokens[..., None]).squeeze(2)  # (B, n)
    q_token = q[:, :n].gather(2, tokens[..., None]).squeeze(2)  # (B, n)
    valid = valid & (q_token > 0)  # what is no draw from q is passed over
    num_accepted = leading_true(valid & (uniforms * q_token < p_token))  # (B,); u < p/q without the division
    rows = torch.arange(len(tokens), device=tokens.device)
    stop = num_accepted.clamp(max=n - 1)  # (B,)
    rejected = (num_accepted < n) & valid[rows, stop]  # (B,); False where the draft ended
    p_next = p[rows, num_accepted]  # (B, V)
    return Verdict(num_accepted, torch.where(rejected[:, None], residual(p_next, q[rows, stop]), p_next))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)_+ normalised over the last dimension.

    Where p <= q everywhere, p equals q up to rounding and a rejection has probability zero in exact
    arithmetic; the residual is then p itself, never a division by zero.
    """
    excess = (p - q).clamp_(min=0)
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


def chain_walk(num_accepted: Tensor, n: int) -> Walk:
    """The walk down a chain of n drafted tokens, of which (B,) num_accepted stay."""
    nodes = torch.arange(1, n + 1, device=num_accepted.device).expand(len(num_accepted), n)  # (B, n)
    return Walk(num_accepted, nodes * (nodes <= num_accepted[:, None]), num_accepted)
