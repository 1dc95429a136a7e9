"""Keys and values of one layer, in place: a write is a copy, a rollback is an assignment to `length`, and windows are
enforced by the model's own masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from layerskip.model.block import Block


class RollbackLayer(DynamicLayer):
    """Keys and values of one layer in a preallocated buffer that doubles when it is full.

    Args:
        capacity: positions to allocate at the first write.
        limit: positions that will never be exceeded, if known; doubling stops there, so that a cache whose
            final length is known wastes no memory.
    """

    is_sliding = False

    def __init__(self, capacity: int = 256, limit: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.limit = limit
        self.length = 0

    @property
    def keys(self) -> Tensor | None:
        """What is valid of the keys, (batch, kv_heads, length, head_dim), for transformers to read."""
        return self._keys[:, :, : self.length] if self.is_initialized else None

    @keys.setter
    def keys(self, buffer: Tensor) -> None:
        self._keys = buffer

    @property
    def values(self) -> Tensor | None:
        """The same of the values."""
        return self._values[:, :, : self.length] if self.is_initialized else None

    @values.setter
    def values(self, buffer: Tensor) -> None:
        self._values = buffer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self._keys = _buffer_like(key_states, self.capacity)  # (batch, kv_heads, capacity, head_dim)
        self._values = _buffer_like(value_states, self.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (batch, kv_heads, n, head_dim) states; return views of all (batch, kv_heads, length, head_dim)."""
        start, stop = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.capacity = max(self.capacity, stop)
            self.lazy_initialization(key_states, value_states)
        elif stop > self.capacity:
            self._grow(stop)
        self._keys[:, :, start:stop] = key_states
        self._values[:, :, start:stop] = value_states
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def write(self, key_states: Tensor, value_states: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Put (batch, kv_heads, n, head_dim) states into the block's slots; return views of all slots it reads."""
        if not self.is_initialized:
            self.capacity = max(self.capacity, block.end)
            self.lazy_initialization(key_states, value_states)
        elif block.end > self.capacity:
            self._grow(block.end)
        self._keys[block.rows, :, block.slots] = key_states.transpose(1, 2)  # (batch, n, kv_heads, head_dim)
        self._values[block.rows, :, block.slots] = value_states.transpose(1, 2)
        self.length = block.end
        return self._keys[:, :, : block.end], self._values[:, :, : block.end]

    def move(self, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` (rows, n) of the rows (rows, 1) to `targets` (rows, n); the two may overlap."""
        self._keys[rows, :, targets] = self._keys[rows, :, sources]
        self._values[rows, :, targets] = self._values[rows, :, sources]

    def join(self, other: RollbackLayer, rows: int) -> None:
        """Add `rows` rows: those that another layer holds, or empty ones if nothing was written to it."""
        length = max(self.length, other.length)
        self.capacity = max(self.capacity, length)
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = _buffer_like(old, self.capacity, len(old) + rows)
            new[: len(old), :, : self.length] = old[:, :, : self.length]
            if other.is_initialized:
                new[len(old) :, :, : other.length] = getattr(other, name)[:, :, : other.length]
            setattr(self, name, new)
        self.length = length

    def rollback(self, length: int) -> None:
        """Forget every position from `length` on; O(1).

        Raises:
            ValueError: if `length` is more than the layer holds, or negative.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} positions: the layer holds {self.length}")
        self.length = length

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' name for a rollback by a (negative) number of positions."""
        self.rollback(self.length - abs(tokens_to_remove))

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.rollback(0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(self._keys.repeat_interleave(repeats, 0), self._values.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(self._keys[indices], self._values[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx.to(self._keys.device))

    def _grow(self, needed: int) -> None:
        capacity = 2 * self.capacity if self.limit is None else min(2 * self.capacity, self.limit)
        self.capacity = max(capacity, needed)
        for name in ("_keys", "_values"):  # one at a time: at most one buffer exists twice
            old = getattr(self, name)
            new = _buffer_like(old, self.capacity)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)
            del old

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values


def _buffer_like(states: Tensor, capacity: int, rows: int | None = None) -> Tensor:
    batch, heads, _, width = states.shape
    batch = batch if rows is None else rows
    # An ordinary tensor wherever it is made, so that the cache can be written outside inference mode too. Zeros: what
    # attention is masked from must still be finite, and short rows have slots that are never written.
    with torch.inference_mode(False):
        return torch.zeros(batch, heads, capacity, width, dtype=states.dtype, device=states.device)
