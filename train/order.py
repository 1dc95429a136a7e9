"""The order in which training reads blocks: pure functions of (run.seed, sequence number).

So resuming is exact, and the rows of a step are the same however many processes share them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np


def allot(count: int, weights: Sequence[float]) -> list[int]:
    """`count` dealt out in proportion to `weights`, largest remainders first; where it can be, at least one each."""
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    for i, share in enumerate(shares):
        if share == 0 and max(shares) > 1:
            shares[shares.index(max(shares))] -= 1
            shares[i] = 1
    return shares


@lru_cache(maxsize=4)
def cycle_places(seed: int, cycle: int, shares: tuple[int, ...]) -> list[tuple[int, int]]:
    """(source, how many of the cycle came from it before) at each place of a cycle."""
    sources = np.repeat(np.arange(len(shares)), shares)
    # The last number keeps these draws apart from those of the blocks.
    order = np.random.default_rng([seed, cycle, len(shares), 1]).permutation(sources).tolist()
    seen = [0] * len(shares)
    places = []
    for source in order:
        places.append((source, seen[source]))
        seen[source] += 1
    return places


@lru_cache(maxsize=32)  # two for each source: a batch may lie across two epochs
def _permutation(seed: int, epoch: int, source: int, num_blocks: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch, source]).permutation(num_blocks)


def block_index(seed: int, position: int, num_blocks: int, source: int = 0) -> int:
    """The block that a source's sequence number `position` reads: a pure function, so that resuming is exact.

    Every epoch (num_blocks positions) visits each block once, in an order drawn from (seed, epoch, source).
    """
    epoch, offset = divmod(position, num_blocks)
    return int(_permutation(seed, epoch, source, num_blocks)[offset])


def micro_batches(
    step: int, global_batch_size: int, micro_batch_size: int, rank: int, num_processes: int
) -> list[range]:
    """Sequence numbers that process `rank` reads in optimizer step `step`: one range per micro-step.

    In each micro-step the processes' ranges lie side by side, so that the rows of a step are the same however
    many processes share them.
    """
    start = step * global_batch_size
    stride = micro_batch_size * num_processes
    first_rows = range(start + rank * micro_batch_size, start + global_batch_size, stride)
    return [range(first, first + micro_batch_size) for first in first_rows]
