"""The loop: draft, verify, accept, commit. A generator of typed steps over token ids; no text here.

Inference mode saves a tenth of the time of small models over no_grad; what is handed out (`step.py`) are ordinary
tensors.

Between two rounds every layer of the cache holds, of each row, the committed tokens but the last. That last one, the
root, is where the next draft starts. A prompt therefore is prefilled up to its last token, and the first round is like
every other. A row that is finished leaves the batch at once, and costs nothing from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from layerskip.decode.joining import Newcomer, join, prefill
from layerskip.decode.step import Step, steps_of
from layerskip.draft.drafters import Drafter
from layerskip.exact.acceptance import Walk
from layerskip.exact.policy import Policy
from layerskip.exact.sampling import Sampler
from layerskip.model.cache import RollbackCache
from layerskip.model.rows import Rows
from layerskip.model.stages import Stages
from layerskip.model.tree import Draft

# (committed (1, length), new (1, n)) of a row -> (how many of the new tokens stay, whether the row ends there)
Stop = Callable[[Tensor, Tensor], tuple[int, bool]]

# number of rows that are going -> rows that join them
Admit = Callable[[int], Sequence[Newcomer]]


@torch.inference_mode()
def decode(
    stages: Stages,
    prompts: Tensor | Sequence[Tensor],
    samplers: Sampler | Sequence[Sampler],
    stops: Stop | Sequence[Stop],
    *,
    drafter: Drafter,
    max_length: int | Sequence[int],
    cache: RollbackCache,
    contexts: Sequence[Tensor] | None = None,
    keep_scores: bool = False,
    prefill_chunk: int | None = None,
    admit: Admit | None = None,
) -> Iterator[Step]:
    """Decode every row until its stop ends it or `max_length` is reached; one step for each row a round.

    The output is the whole model's: the same tokens when greedy, the same distribution when sampling. The
    generator may be abandoned at any step; the cache is then left consistent, holding all committed tokens
    but the last.

    Args:
        stages: the cut model; without an exit layer this is plain autoregressive decoding.
        prompts: (B, length), or (length,) of each row: at least one token, no padding.
        samplers: how tokens are chosen, from draft and target alike: of all rows, or of each.
        stops: where committed tokens are cut and whether a row ends: for all rows, or for each.
        drafter: what proposes.
        max_length: most tokens of a row in all, prompt (`contexts` where given) included: of all rows, or of each.
        cache: empty, or for a single row holding the first positions of its prompt.
        contexts: (width,) of each row what logits processors and stops are shown as the prompt, where it is not
            the prompt itself (padding).
        keep_scores: keep logits and scores in the steps.
        prefill_chunk: tokens of the prompt that are read at once; None: all.
        admit: asked, after every round that leaves rows, with their number: rows that join them. Their steps are
            numbered on from the rows before. None: nobody.
    """
    # Of each row, so that newcomers can bring theirs.
    each_sampler = [samplers] * len(prompts) if isinstance(samplers, Sampler) else list(samplers)
    each_stop = [stops] * len(prompts) if callable(stops) else list(stops)
    policy = Policy(each_sampler)
    rows = Rows(list(prompts), list(prompts if contexts is None else contexts), max_length)
    held = max(rows.in_cache)  # positions that are right, wherever a round is broken off
    try:
        prefill(stages, rows, cache, prefill_chunk)
        drafter.start(rows)
        while True:
            steps, ended = _round(stages, drafter, cache, rows, policy, each_stop, keep_scores)
            drafter.observe(steps)
            policy.forget(rows)
            going = [row for row in range(len(rows)) if not ended[row]]
            if going:
                _keep(going, cache, rows)
            held = max(rows.in_cache)
            yield from steps
            if not going:
                return
            if admit is not None and (newcomers := admit(len(rows))):
                drafter.start(join(newcomers, stages, cache, rows, prefill_chunk))
                each_sampler += [newcomer.sampler for newcomer in newcomers]
                each_stop += [newcomer.stop for newcomer in newcomers]
                held = max(rows.in_cache)
    finally:
        cache.rollback(held)


def _round(
    stages: Stages,
    drafter: Drafter,
    cache: RollbackCache,
    rows: Rows,
    policy: Policy,
    stops: Sequence[Stop],
    keep_scores: bool,
) -> tuple[list[Step], list[bool]]:
    """Draft, verify, accept, commit; a step for each row, and whether it ended."""
    t0 = perf_counter()
    draft = drafter.draft(stages, cache, rows, policy)
    t1 = perf_counter()
    logits = stages.verify(torch.cat([rows.roots, draft.tokens], dim=1), draft.hidden, cache, draft.block)
    t2 = perf_counter()
    scores = policy.scores(logits, rows, draft.tokens if draft.block is None else draft)  # (B, N+1, vocab)
    walk, following = policy.accept(draft, scores, rows)
    kept, ended = _commit(rows, draft, walk, following, stops)
    _compact(cache, rows, draft, walk)
    seconds = (t1 - t0, t2 - t1, perf_counter() - t2)
    return steps_of(rows, draft, walk, kept, seconds, (logits, scores) if keep_scores else None), ended


def _keep(going: Sequence[int], cache: RollbackCache, rows: Rows) -> None:
    """Rows that have ended leave the batch; the positions that only they had, the cache."""
    if len(going) < len(rows):
        cache.select(torch.tensor(going, device=rows.device))
        rows.keep(going)
        cache.rollback(max(rows.in_cache))


def _commit(
    rows: Rows, draft: Draft, walk: Walk, following: Tensor, stops: Sequence[Stop]
) -> tuple[list[Tensor], list[bool]]:
    """Commit to every row what was accepted and the token after it, cut by the stop; the (1, n) tokens of each row,
    and whether it ended."""
    kept, ended, rooms = [], [], rows.rooms
    for row, accepted in enumerate(walk.num_accepted.tolist()):
        nodes = walk.path[row : row + 1, :accepted] - 1  # (1, accepted)
        tokens = draft.tokens[row : row + 1]
        new = torch.cat([tokens.gather(1, nodes), following[row].view(1, 1)], dim=1)[:, : rooms[row]]
        count, finished = stops[rows.index[row]](rows.committed(row), new)
        new = new[:, :count]
        ended.append(finished or count >= rooms[row])
        rows.append(row, new)
        kept.append(new)
    rows.settle()
    return kept, ended


def _compact(cache: RollbackCache, rows: Rows, draft: Draft, walk: Walk) -> None:
    """Bring what was accepted together behind each row's end, and forget the rest."""
    if draft.block is not None and walk.path.shape[1]:
        slots = walk.path if draft.slots is None else draft.slots.gather(1, walk.path)  # (B, D)
        first = draft.block.slots[:, :1]  # (B, 1): where the roots stand
        places = torch.arange(1, slots.shape[1] + 1, device=slots.device).expand_as(slots)
        accepted = places <= walk.num_accepted[:, None]  # beyond, a slot is copied to itself
        if bool((accepted & (slots != places)).any()):
            sources = torch.where(accepted, slots, places)
            cache.move(torch.arange(len(slots), device=slots.device), first + sources, first + places)
    cache.rollback(max(rows.in_cache))
