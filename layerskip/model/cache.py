"""A key/value cache that is written in place and forgets in O(1).

Speculation writes positions it may have to take back. `torch.cat` per step copies everything each time and
sliding-window caches cannot be rolled back at all, so every layer here (`cache_layer.py`) keeps its full length in one
preallocated buffer. Each layer has its own length, because a draft writes layers [0:E) ahead of layers [E:L).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from layerskip.model.block import Block
from layerskip.model.cache_layer import RollbackLayer


class _FullLayersCache(Cache):
    """A cache whose layers are all `RollbackLayer`s: what transformers asks of every layer, again at every mask,
    has one answer."""

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.layers)

    is_linear = is_dummy = is_sliding

    block: Block | None = None  # of the pass that runs, where tokens do not just follow the last position

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if self.block is None:
            return layer.update(key_states, value_states)
        return layer.write(key_states, value_states, self.block)


class RollbackCache(_FullLayersCache):
    """The cache of a whole model: one `RollbackLayer` a decoder layer, shared by the views of its stages.

    Args:
        num_layers: decoder layers of the model.
        capacity: positions to allocate at first.
        limit: positions that will never be exceeded, if known.

    Attributes:
        blocks: exit layer -> the layers of the blocks that it drafts through, from its first draft on.
    """

    def __init__(self, num_layers: int, capacity: int = 256, limit: int | None = None) -> None:
        super().__init__(layers=[RollbackLayer(capacity, limit) for _ in range(num_layers)])
        self.blocks: dict[int, list[RollbackLayer]] = {}
        self._size = capacity, limit

    @property
    def _all(self) -> list[RollbackLayer]:
        return [*self.layers, *(layer for block in self.blocks.values() for layer in block)]

    @property
    def length(self) -> int:
        """Positions every layer of the model holds. (Blocks may hold fewer, until `fit`: where others than `Stages`
        decoded with the cache, such as `model.generate`.)

        Raises:
            RuntimeError: if early layers are ahead of late ones, as they are between a draft and its commit.
        """
        lengths = {layer.length for layer in self.layers}
        if len(lengths) != 1:
            raise RuntimeError(f"layers hold different numbers of positions: {sorted(lengths)}")
        return lengths.pop()

    def rollback(self, length: int) -> None:
        """Forget every position from `length` on in all layers.

        Afterwards all layers hold the same number: `length`, or what the shortest holds, where an error left
        some short.
        """
        length = min(length, *(layer.length for layer in self._all))
        for layer in self._all:
            layer.rollback(length)

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' name for a rollback by a (negative) number of positions."""
        self.rollback(self.get_seq_length() - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything."""
        self.rollback(0)

    def select(self, rows: Tensor) -> None:
        """Keep these rows (n,) of the batch, and forget the others."""
        for layer in self._all:
            if layer.is_initialized:
                layer.batch_select_indices(rows)

    def join(self, other: RollbackCache, rows: int) -> None:
        """Add the `rows` rows of another cache behind this one's. Of a row that holds fewer positions than the cache,
        what follows them is for nobody to look at."""
        for layer, others in zip(self.layers, other.layers, strict=True):
            layer.join(others, rows)
        for exit_layer, blocks in self.blocks.items():
            for layer, others in zip(blocks, other._blocks_of(exit_layer, len(blocks)), strict=True):
                layer.join(others, rows)

    def move(self, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` (n, m) of the rows (n,) to `targets` (n, m) in all layers."""
        for layer in self._all:
            layer.move(rows[:, None], sources, targets)

    def stage(self, start: int, stop: int, block: Block | None = None, num_blocks: int = 0) -> StageCache:
        """What layers [start:stop) see of this cache, and behind them so many blocks, whose layers are their own."""
        layers = self.layers
        if num_blocks:
            layers = [*layers[:stop], *self._blocks_of(stop, num_blocks), *layers[stop + num_blocks :]]
        return StageCache(layers, start, stop, block)

    def fit(self, exit_layer: int | None, num_blocks: int) -> None:
        """Forget the layers of all blocks but this exit's, and every position that these have not seen: what others
        decoded with this cache."""
        if exit_layer is None or not num_blocks:
            self.blocks = {}
            return
        own = self._blocks_of(exit_layer, num_blocks)
        self.blocks = {exit_layer: own}
        self.rollback(min(layer.length for layer in own))

    def _blocks_of(self, exit_layer: int, number: int) -> list[RollbackLayer]:
        if exit_layer not in self.blocks:
            self.blocks[exit_layer] = [RollbackLayer(*self._size) for _ in range(number)]
        return self.blocks[exit_layer]


def check_own_cache(cache: RollbackCache, num_layers: int, prompts: list[int]) -> RollbackCache:
    """Return the cache if it can hold the first positions of the prompts (of these lengths, padding not counted).

    Raises:
        ValueError: with what it holds, and what to give.
    """
    if len(prompts) > 1:
        raise ValueError(f"a cache of one's own goes with a single sequence, not with {len(prompts)}: leave it out")
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the model {num_layers}: give RollbackCache({num_layers})"
        )
    if cache.length >= prompts[0]:
        raise ValueError(
            f"the cache holds {cache.length} positions but the prompt has only {prompts[0]}: roll it back "
            "to at most one less than the prompt"
        )
    keys = cache.layers[0].keys
    if keys is not None and len(keys) != 1:
        raise ValueError(f"the cache holds {len(keys)} sequences: give one that holds the prompt's alone")
    return cache


class StageCache(_FullLayersCache):
    """A view of a `RollbackCache` for layers [start:stop): the same layer objects, but the questions that
    transformers asks of "the first layer" (how long is the cache, how wide is the mask) are answered by
    this stage's first layer, since the other stage may hold a different number of positions."""

    def __init__(self, layers: list[RollbackLayer], start: int, stop: int, block: Block | None = None) -> None:
        super().__init__(layers=layers)
        self.start, self.stop, self.block = start, stop, block

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.block is not None:  # what makes the widths that models compute from it come out as the block's
            return self.block.end - self.block.length
        return self.layers[self._own(layer_idx)].get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if self.block is not None:
            return self.block.end, 0
        return self.layers[self._own(layer_idx)].get_mask_sizes(query_length)

    def _own(self, layer_idx: int) -> int:
        return layer_idx if self.start <= layer_idx < self.stop else self.start


def shared_length(a: list[int], b: list[int]) -> int:
    """How many first tokens two sequences share: what a cache of the one can serve the other with."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
