"""The rows of a batch: their prompts without padding, what is committed to each, and which are still going."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Rows:
    """B sequences of unequal length.

    Attributes:
        limit: most tokens of a row in all, without padding. The last one is never read.
        index: for each row still going, which row of the batch it was.
        lengths: (B,) positions that each row has in the cache between two rounds: all its tokens but the last.
        rooms: tokens that each row may still commit, at least 1.

    Args:
        prompts: (length,) token ids of each row, at least one, without padding.
        contexts: (width,) what logits processors and stops are shown as the prompt of each row, padding included.
        limit: most tokens of a row in all, its context counted: of all rows, or of each.
    """

    def __init__(self, prompts: Sequence[Tensor], contexts: Sequence[Tensor], limit: int | Sequence[int]) -> None:
        self._limits = [limit] * len(prompts) if isinstance(limit, int) else list(limit)
        rows = zip(self._limits, prompts, contexts, strict=True)
        self.limit = max(own - len(context) + len(prompt) for own, prompt, context in rows)
        self.index = list(range(len(prompts)))
        self.device = prompts[0].device
        self._in_cache = [len(prompt) - 1 for prompt in prompts]
        self.prompts = list(prompts)
        self._committed = [context[None] for context in contexts]  # (1, context + new) each
        self.roots = torch.stack([prompt[-1:] for prompt in prompts])  # (B, 1) last committed tokens
        self._place()

    def __len__(self) -> int:
        return len(self.index)

    def _place(self) -> None:
        self.lengths = torch.tensor(self._in_cache, device=self.device)
        committed = zip(self.index, self._committed, strict=True)
        self.rooms = [self._limits[index] - row.shape[1] for index, row in committed]

    @property
    def in_cache(self) -> list[int]:
        """`lengths` as numbers."""
        return self._in_cache

    def committed(self, row: int) -> Tensor:
        """(1, length) what processors and stops see of a row."""
        return self._committed[row]

    def append(self, row: int, new: Tensor) -> None:
        """Commit (1, n) tokens to a row; call `settle` when all rows have theirs."""
        self._committed[row] = torch.cat([self._committed[row], new], dim=1)
        self._in_cache[row] += new.shape[1]

    def settle(self) -> None:
        """After a round: roots and lengths are those of what was committed."""
        self.roots = torch.cat([row[:, -1:] for row in self._committed])
        self._place()

    def join(self, others: Rows) -> None:
        """Add rows behind these, between two rounds; their `index` goes on from the rows there were."""
        others.index = [len(self._limits) + i for i in others.index]
        self._limits += others._limits
        self.limit = max(self.limit, others.limit)
        self.index += others.index
        self._in_cache += others._in_cache
        self.prompts += others.prompts
        self._committed += others._committed
        self.settle()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.index = [self.index[row] for row in rows]
        self._in_cache = [self._in_cache[row] for row in rows]
        self._committed = [self._committed[row] for row in rows]
        self.settle()
