"""Random numbers that are a pure function of where training is.

Nothing is drawn from a global generator and nothing is kept between steps: a resumed run, gradient checkpointing's
recompute and any number of processes that share a batch all see the same numbers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))


def row_uniforms(width: int, first_row: int, rows: int, *key: int | str) -> Tensor:
    """Uniforms on [0, 1), (rows, width) float32 on the CPU: row i is keyed by `key` and its place first_row + i in
    the batch over all processes, and a wider row begins with the same numbers."""
    drawn = [torch.rand(width, generator=keyed_generator(*key, first_row + row)) for row in range(rows)]
    return torch.stack(drawn) if drawn else torch.empty(0, width)
