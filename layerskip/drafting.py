"""What proposes: the record every drafter fills, and the early-exit chain."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.cache import RollbackCache
from layerskip.sampling import Sampler
from layerskip.stages import Stages


class Draft(NamedTuple):
    """What verification is given. The root is the last committed token of each row.

    Attributes:
        tokens: (batch, N) drafted token ids.
        parents: (N,) index of the token each one follows, -1 for the root. A chain is -1, 0, 1, ...
        probabilities: (batch, N, vocab) float32, the q each token was drawn from; None where tokens are a
            function of their prefix alone.
        hidden: (batch, N+1, hidden_size) exit hidden states of root and tokens; None if layers [0:E) did
            not run.
    """

    tokens: Tensor
    parents: Tensor
    probabilities: Tensor | None
    hidden: Tensor | None


def draft_nothing(root: Tensor) -> Draft:
    """No proposal: verification then is plain decoding."""
    none = root[:, :0]
    return Draft(none, none[0], None, None)


def draft_chain(
    stages: Stages,
    cache: RollbackCache,
    root: Tensor,
    prefix: Tensor,
    sampler: Sampler,
    num_draft_tokens: int,
) -> Draft:
    """Draft a chain with layers [0:E) and the model's own head.

    The last token passes through layers [0:E) too, without the head: verification needs its hidden state.

    Args:
        root: (batch, 1) last committed tokens, not yet in the cache.
        prefix: (batch, length) all committed tokens, root included.
        num_draft_tokens: N, at least 0.
    """
    current, tokens, distributions, hiddens = root, [], [], []
    drafted = root[:, :0]  # (batch, i)
    for _ in range(num_draft_tokens):
        logits, hidden = stages.draft(current, cache)
        assert logits is not None
        seen = torch.cat([prefix, drafted], dim=1) if sampler.reads_prefix else prefix
        current, q = sampler.choose(sampler.scores(logits, seen, drafted[:, :0])[:, 0])
        tokens.append(current)
        hiddens.append(hidden)
        if q is not None:
            distributions.append(q)
        if sampler.reads_prefix:
            drafted = torch.cat(tokens, dim=1)
    _, hidden = stages.draft(current, cache, with_logits=False)
    return Draft(
        tokens=torch.cat(tokens, dim=1) if tokens else root[:, :0],
        parents=torch.arange(-1, num_draft_tokens - 1, device=root.device),
        probabilities=torch.stack(distributions, dim=1) if distributions else None,
        hidden=torch.cat([*hiddens, hidden], dim=1),
    )
