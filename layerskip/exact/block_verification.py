"""Block verification: a sampled chain judged as a whole (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

Rejection throws a good token away when an earlier one was unlucky. Here the longest prefix that passes is kept, so a
likely token pays for an unlikely one before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip.exact.acceptance import Walk, chain_walk, leading_true, residual


def walk_block(tokens: Tensor, valid: Tensor, q: Tensor, p: Tensor, uniforms: Tensor) -> tuple[Walk, Tensor]:
    """Keep the longest drafted prefix that passes its test; draw the next token from what the block has left.

    Below, x^i = x_1 .. x_i are drafted, p(. | x^i) and q(. | x^i) follow them, n is the row's draft length.

        w_0 = 1,  w_i = min(1, w_{i-1} p(x_i | x^{i-1}) / q(x_i | x^{i-1}))
        R_i = sum_y (w_i p(y | x^i) - q(y | x^i))_+                       what q lacks after x^i
        h_i = R_i / (R_i + 1 - w_i)  for i < n,   h_n = w_n
        k   = the largest i with u_i < h_i, or 0
        next token ~ (w_k p(. | x^k) - q(. | x^k))_+ / R_k  if k < n,  else ~ p(. | x^n)

    Proof. First, Pr[k >= i | x^i] = w_i, by induction from n down. At n it is h_n = w_n. Below, the chance that a
    longer prefix passes is S = sum_y q(y | x^i) w_{i+1}(y) = sum_y min(q, w_i p)(y) = w_i - R_i, so that
    S + (1 - S) h_i = w_i - R_i + (1 - w_i + R_i) h_i = w_i, and Pr[k = i | x^i] = (1 - S) h_i = R_i. (Where
    R_i + 1 - w_i = 0, S = 1 and h_i is never asked. At i = 0, Pr[k = 0] = 1 - S = R_0 and w_0 = 1 say the same.)
    So with Q(x^i) the chance to draft x^i, and y any token,

        Pr[x^i drafted, k >= i] p(y | x^i) = Q(x^i) w_i p(y | x^i)
            = Q(x^i) min(q, w_i p)(y)            = Pr[x^i y drafted, k >= i + 1]
            + Q(x^i) (w_i p - q)_+(y)            = Pr[x^i drafted, k = i, next token y]

    So what follows x^i, kept and not yet at its end, is y with the target's probability; after the next token the
    coming rounds go on with p. Adding both ways to emit x^i, any continuation is emitted with the target's
    probability. The proof takes n = i to be known from x^i, not from x_{i+1}: the draft may stop on what it has drawn
    and on q, not drop a token because of its value.

    Never worse than rejection: E[k] = sum_i E[w_i], rejection keeps sum_i E[prod_{j<=i} min(1, p/q)], and w_i is at
    least that product.

    Args:
        tokens: (B, N) int64, tokens[:, i] drawn from q[:, i].
        valid: (B, N) bool, the row's draft: its leading True entries.
        q: (B, N, vocab) float32, the draft's distribution before each token.
        p: (B, N+1, vocab) float32, the target's.
        uniforms: (B, N) on [0, 1), independent of everything else.

    Returns:
        the walk, and the distribution (B, vocab) of the token that follows it.
    """
    batch, n = tokens.shape
    if n == 0:
        return chain_walk(tokens.new_zeros(batch), 0), p[:, 0]
    order = torch.arange(1, n + 1, device=tokens.device)  # (N,)
    rows = torch.arange(batch, device=tokens.device)  # (B,)
    length = leading_true(valid)  # (B,)
    w = _weights(tokens, q, p)  # (B, N+1)
    left = (w[:, 1:n, None] * p[:, 1:n]).sub_(q[:, 1:n]).clamp_(min=0).sum(-1)  # (B, N-1): R_1 .. R_{N-1}
    left = torch.nn.functional.pad(left, (0, 1))  # (B, N); R_N is not asked
    w_end = w[:, 1:]  # (B, N)
    # u < R / (R + 1 - w) written without the division; w = 0 leaves R = 0 and never passes.
    inside = uniforms * (left + (1 - w_end)) < left  # (B, N)
    passes = torch.where(order == length[:, None], uniforms < w_end, inside & (order < length[:, None]))  # (B, N)
    num_accepted = (passes * order).amax(1)  # (B,)
    p_next = p[rows, num_accepted]  # (B, V)
    rest = residual(w[rows, num_accepted][:, None] * p_next, q[rows, num_accepted.clamp(max=n - 1)])  # (B, V)
    cut = (num_accepted < length)[:, None]  # (B, 1)
    return chain_walk(num_accepted, n), torch.where(cut, rest, p_next)


def _weights(tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """w_0 .. w_N: (B, N+1)."""
    n = tokens.shape[1]
    p_token = p[:, :n].gather(2, tokens[..., None]).squeeze(2)  # (B, N)
    q_token = q.gather(2, tokens[..., None]).squeeze(2)  # (B, N), > 0 where the token was drawn from q
    ratio = p_token / q_token.clamp(min=torch.finfo(q.dtype).tiny)  # (B, N)
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(n):
        w.append((w[-1] * ratio[:, i]).clamp(max=1))
    return torch.stack(w, 1)
