"""Rows that join a batch which is being decoded: continuous batching, between two rounds.

A newcomer's prompt is read apart, into a cache of its own, which then becomes one more row of the batch's. Since every
row fills its slots from 0 (`block.py`), it does not matter how far the others are: its output is what it is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.exact.sampling import Sampler
from layerskip.model.rows import Rows

if TYPE_CHECKING:
    from layerskip.decode.decoding import Stop
    from layerskip.model.cache import RollbackCache
    from layerskip.model.stages import Stages


@dataclass(frozen=True)
class Newcomer:
    """A row that joins.

    Attributes:
        prompt: (length,) token ids, at least one, without padding.
        max_length: most tokens of the row in all, prompt included.
        sampler: how its tokens are chosen. Rows that share one are processed together.
        stop: where its tokens are cut and whether it ends.
    """

    prompt: Tensor
    max_length: int
    sampler: Sampler
    stop: Stop


def prefill(stages: Stages, rows: Rows, cache: RollbackCache, chunk: int | None) -> None:
    """Read all prompts up to their last tokens, `chunk` positions at once (None: all). Short rows are filled up on
    the right: what is written there is behind the row's end, where nothing looks until it is written anew."""
    prompts = [prompt[:-1] for prompt in rows.prompts]
    token_ids = prompts[0][None] if len(prompts) == 1 else pad_sequence(prompts, batch_first=True)  # (B, longest)
    start, length = cache.length, token_ids.shape[1]
    for first in range(start, length, chunk or max(length, 1)):
        stages.prefill(token_ids[:, first : min(first + (chunk or length), length)], cache)


def join(newcomers: Sequence[Newcomer], stages: Stages, cache: RollbackCache, rows: Rows, chunk: int | None) -> Rows:
    """Add newcomers behind the rows of a batch, between two rounds; returns them, numbered on from those before.

    Raises:
        ValueError: for acceptance="coupled", whose noise is numbered by the rows that a call began with; for a prompt
            that leaves no room for a token.
    """
    for newcomer in newcomers:
        if newcomer.max_length <= len(newcomer.prompt):
            raise ValueError(
                f"max_length={newcomer.max_length} leaves no room behind a prompt of {len(newcomer.prompt)} tokens: "
                "give more, or a shorter prompt"
            )
    if any(newcomer.sampler.do_sample and newcomer.sampler.acceptance == "coupled" for newcomer in newcomers):
        raise ValueError("acceptance='coupled' keys its noise by the rows a call began with: no row can join them")
    prompts = [newcomer.prompt for newcomer in newcomers]
    joined = Rows(prompts, prompts, [newcomer.max_length for newcomer in newcomers])
    own = stages.new_cache(max(1, *joined.in_cache))
    prefill(stages, joined, own, chunk)
    cache.join(own, len(joined))
    rows.join(joined)
    return joined
