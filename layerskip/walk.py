"""How far speculation would get on a text, told from the chance that each of its tokens is accepted as a draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def mean_acceptance_length(chances: Sequence[Tensor], num_draft_tokens: int) -> float:
    """Tokens committed per verify step, bonus included, when decoding walks the texts as if it had written them.

    A round that starts before token t commits j + 1 tokens if j drafts are accepted and the next one is not, or all
    N are; the next round starts behind them. With a_t the chance that token t is accepted, given those before it:

        length_t = 1 + Σ_{k=1..N} Π_{j<k} a_{t+j},    starts_{t+j+1} += starts_t · P(j accepted)

    and the answer is Σ starts_t · length_t / Σ starts_t. Greedy decoding has chances 0 and 1, and this is its walk.
    Sampling accepts with chance a_t = 1 - TV(p, q); the texts stand for those that would be sampled, and what was
    accepted before is taken to say nothing about what comes.

    Args:
        chances: (length,) each, of any lengths: a_t for every token of a text.
        num_draft_tokens: N, at least 1.

    Returns:
        1 to N + 1; nan if no text is as long as one round.
    """
    lengths = torch.tensor([len(text) for text in chances])  # (texts,)
    if not len(chances) or lengths.max() <= num_draft_tokens:
        return float("nan")
    padded = pad_sequence([text.double() for text in chances], batch_first=True)  # (texts, longest)
    starts, committed = _walk(padded, num_draft_tokens)
    # Only rounds that fit whole count, or the end of a text would look like rejections.
    starts = starts * (torch.arange(starts.shape[1]) < (lengths - num_draft_tokens)[:, None])
    return float((starts * committed).sum() / starts.sum())


def _walk(chances: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Expected rounds that start before each token, and the tokens such a round commits: (texts, longest - n) each."""
    texts, longest = chances.shape
    drafts = chances[:, :-1].unfold(1, n, 1)  # (texts, longest - n, n)
    reached = torch.cat([torch.ones_like(drafts[..., :1]), drafts.cumprod(-1)], -1)  # P(the first j are accepted)
    ends = reached - torch.cat([reached[..., 1:], torch.zeros_like(drafts[..., :1])], -1)  # P(just these)
    starts = chances.new_zeros(texts, longest + 1)
    starts[:, 0] = 1
    for t in range(longest - n):
        starts[:, t + 1 : t + n + 2] += starts[:, t : t + 1] * ends[:, t]
    return starts[:, : longest - n], reached.sum(-1)
