"""The loop: draft, verify, accept, roll back. A generator of typed steps over token ids; no text here.

Inference mode saves a tenth of the time of small models over no_grad; what is handed out are ordinary tensors.

Between two steps every layer of the cache holds the same number of positions, the committed tokens but
the last. That last one, the root, is where the next draft starts. A prompt therefore is prefilled up to
its last token, and the first round is like every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from layerskip.acceptance import accept_greedy, accept_sampled
from layerskip.cache import RollbackCache
from layerskip.drafting import Draft, draft_chain, draft_nothing
from layerskip.sampling import Sampler
from layerskip.stages import Stages

# (committed (batch, length), new (batch, n)) -> (how many of the new tokens stay, whether decoding ends there)
Stop = Callable[[Tensor, Tensor], tuple[int, bool]]


@dataclass(frozen=True)
class Step:
    """What one draft-then-verify round commits.

    Attributes:
        tokens: (batch, n) committed token ids, 1 <= n <= num_drafted + 1; fewer than num_accepted + 1 only
            where a stop cut them.
        num_drafted: tokens proposed.
        num_accepted: proposed tokens that the rule accepted.
        draft_seconds: host time of layers [0:E), their head and their sampling.
        verify_seconds: host time of layers [E:L) and the head.
        rollback_seconds: host time of the rule, the stops and the rollback.
        logits: (batch, n, vocab) the target's logits at the committed positions, if asked for.
        scores: (batch, n, vocab) float32, the same after the logits processors, if asked for.
    """

    tokens: Tensor
    num_drafted: int
    num_accepted: int
    draft_seconds: float
    verify_seconds: float
    rollback_seconds: float
    logits: Tensor | None = None
    scores: Tensor | None = None


@torch.inference_mode()
def decode(
    stages: Stages,
    input_ids: Tensor,
    sampler: Sampler,
    stop: Stop,
    *,
    num_draft_tokens: int,
    max_length: int,
    cache: RollbackCache,
    context_ids: Tensor | None = None,
    keep_scores: bool = False,
) -> Iterator[Step]:
    """Decode until `stop` ends it or `max_length` is reached.

    The output is the whole model's: the same tokens when greedy, the same distribution when sampling. The
    generator may be abandoned at any step; the cache is then left consistent, holding all committed tokens
    but the last.

    Args:
        stages: the cut model; without an exit layer this is plain autoregressive decoding.
        input_ids: (1, length) prompt, at least one token, no padding.
        sampler: how tokens are chosen, from draft and target alike.
        stop: where committed tokens are cut and whether decoding ends.
        num_draft_tokens: most tokens to draft a round.
        max_length: most tokens in all, prompt (`context_ids` where given) included.
        cache: empty, or holding the first positions of `input_ids`.
        context_ids: (1, longer) what logits processors and stops are shown as the prompt, where it is not
            `input_ids` itself (padding).
        keep_scores: keep logits and scores in the steps.
    """
    committed = input_ids if context_ids is None else context_ids  # what processors and stops see
    root = input_ids[:, -1:]
    in_cache = input_ids.shape[1] - 1
    try:
        if cache.length < in_cache:
            stages.prefill(input_ids[:, cache.length : -1], cache)
        finished = False
        while not finished:
            room = max_length - committed.shape[1]
            t0 = perf_counter()
            draft = _draft(stages, cache, root, committed, sampler, min(num_draft_tokens, room - 1))
            t1 = perf_counter()
            logits = stages.verify(torch.cat([root, draft.tokens], dim=1), draft.hidden, cache)
            t2 = perf_counter()
            scores = sampler.scores(logits, committed, draft.tokens)  # (1, N+1, vocab)
            num_accepted, next_token = _accept(draft, scores, sampler)
            new = torch.cat([draft.tokens[:, :num_accepted], next_token], dim=1)
            kept, finished = stop(committed, new)
            finished = finished or kept >= room
            new = new[:, :kept]
            committed = torch.cat([committed, new], dim=1)
            root, in_cache = new[:, -1:], in_cache + kept
            cache.rollback(in_cache)
            yield Step(
                _outside(new),
                draft.tokens.shape[1],
                num_accepted,
                draft_seconds=t1 - t0,
                verify_seconds=t2 - t1,
                rollback_seconds=perf_counter() - t2,
                logits=_outside(logits[:, :kept]) if keep_scores else None,
                scores=_outside(scores[:, :kept]) if keep_scores else None,
            )
    finally:
        cache.rollback(in_cache)


def _outside(tensor: Tensor) -> Tensor:
    """An ordinary copy: tensors made in inference mode cannot take part in training later."""
    with torch.inference_mode(False):
        return tensor.clone()


def _draft(stages: Stages, cache: RollbackCache, root: Tensor, committed: Tensor, sampler: Sampler, n: int) -> Draft:
    if stages.exit_layer is None:
        return draft_nothing(root)
    return draft_chain(stages, cache, root, committed, sampler, n)


def _accept(draft: Draft, scores: Tensor, sampler: Sampler) -> tuple[int, Tensor]:
    """Apply the rule; return how many drafted tokens stay and the token (1, 1) that follows them."""
    if not sampler.do_sample:
        num_accepted, next_token = accept_greedy(draft.tokens, scores.argmax(dim=-1))
        return int(num_accepted), next_token
    batch, n = draft.tokens.shape
    p = sampler.probabilities(scores)
    q = draft.probabilities if draft.probabilities is not None else p[:, :0]
    verdict = accept_sampled(draft.tokens, q, p, sampler.uniforms(batch, n, p.device))
    return int(verdict.num_accepted), sampler.draw(verdict.next_probabilities)
