"""Blocks of tokens as a model takes them, of one source or of several, mixed. Files are memory-mapped."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerskip.training.objective import IGNORE_INDEX
from train.errors import TrainingError
from train.order import allot, block_index, cycle_places
from train.packing import START, TARGET

_CYCLE = 1000  # sequence numbers in which the sources of a mixture have exactly their shares, at most


class Batch(NamedTuple):
    """Some blocks, as a model takes them: int64 (rows, sequence_length) each."""

    input_ids: Tensor
    labels: Tensor  # the ids; IGNORE_INDEX where they are not learnt
    position_ids: Tensor | None = None  # from 0 in each document, where documents see nothing of each other

    def inputs(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """What a model's forward takes, on `device`."""
        return {name: value.to(device) for name, value in self._asdict().items() if value is not None}


def position_ids(starts: Tensor) -> Tensor:
    """Positions from 0 in each document: (rows, length) for (rows, length) booleans, true where one begins."""
    index = torch.arange(starts.shape[1]).expand(starts.shape)
    return index - torch.where(starts, index, 0).cummax(dim=1).values


class Blocks:
    """The blocks of one split of one source: `len(blocks)` of them, each `sequence_length` tokens."""

    def __init__(
        self, path: Path, dtype: np.dtype[Any], sequence_length: int, has_boundaries: bool = False, least: int = 1
    ) -> None:
        """Map the token file `path` and its marks; without marks all is one document, and learnt.

        `has_boundaries`: the documents of a block see nothing of each other (data.respect_boundaries). Raises
        `TrainingError` if there are fewer than `least` blocks.
        """
        size = path.stat().st_size // dtype.itemsize
        if size < sequence_length * least:
            raise TrainingError(
                f"the {path.stem} text has {size} tokens, data.sequence_length is {sequence_length}: "
                "lower it, give more text, or raise data.held_out" + (" less" if path.stem == "train" else "")
            )
        self._has_boundaries = has_boundaries
        marks = path.with_suffix(".marks")
        self._tokens = _mapped(path, dtype, sequence_length)
        self._marks = _mapped(marks, np.dtype(np.uint8), sequence_length) if marks.is_file() else None

    def __len__(self) -> int:
        return int(self._tokens.shape[0])

    def rows(self, indices: Iterable[int]) -> Batch:
        """The blocks `indices`."""
        chosen = list(indices)
        ids = torch.from_numpy(self._tokens[chosen].astype(np.int64))
        if self._marks is None:
            return Batch(ids, ids)
        marks = torch.from_numpy(self._marks[chosen])
        targets, starts = (marks & TARGET).bool(), (marks & START).bool()
        if not self._has_boundaries:
            return Batch(ids, ids.masked_fill(~targets, IGNORE_INDEX))
        # Nothing that it sees predicts a document's first token.
        return Batch(ids, ids.masked_fill(~targets | starts, IGNORE_INDEX), position_ids(starts))

    def prompt(self, index: int) -> Tensor:
        """The beginning of block `index`, to be continued: (n,) ids of a third of it, or, where only answers are
        learnt, of all that belongs to its first whole answer's prompt, two thirds of a block at most."""
        ids, third = torch.from_numpy(self._tokens[index].astype(np.int64)), self._tokens.shape[1] // 3
        marks = self._marks[index] if self._marks is not None else np.full(len(ids), TARGET, dtype=np.uint8)
        targets = (marks & TARGET).astype(bool)
        begins = np.flatnonzero(targets[1:] & ~targets[:-1]) + 1  # where an answer follows its prompt
        if not len(begins):
            return ids[:third]
        answer = int(begins[0])
        first = int(np.flatnonzero((marks[:answer] & START).astype(bool)).max(initial=0))
        return ids[max(first, answer - 2 * third) : answer]


def _mapped(path: Path, dtype: np.dtype[Any], length: int) -> np.ndarray[Any, Any]:
    """The file's whole blocks, (blocks, length)."""
    size = path.stat().st_size // dtype.itemsize // length * length
    values = np.memmap(path, dtype=dtype, mode="r")[:size] if size else np.empty(0, dtype=dtype)
    return values.reshape(-1, length)


class Mixture:
    """The blocks of several sources (or one), read in proportion to their weights."""

    def __init__(self, parts: Sequence[Blocks], weights: Sequence[float]) -> None:
        """Parts without a block take no part."""
        kept = [(part, weight) for part, weight in zip(parts, weights, strict=True) if len(part)]
        self._parts, self._weights = [part for part, _ in kept], [weight for _, weight in kept]
        shares = allot(_CYCLE, self._weights)
        divisor = math.gcd(*shares)  # the shorter the cycle, the more even: weights 3 and 1 are exact in every four
        self._shares = tuple(share // divisor for share in shares)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def place(self, seed: int, position: int) -> tuple[int, int]:
        """(source, block in it) that the run's sequence number `position` reads: a pure function.

        Every cycle holds each source in exactly its share, in an order drawn from (seed, cycle).
        """
        cycle, offset = divmod(position, sum(self._shares))
        source, rank = cycle_places(seed, cycle, self._shares)[offset]
        read_before = cycle * self._shares[source] + rank
        return source, block_index(seed, read_before, len(self._parts[source]), source)

    def read(self, seed: int, positions: Iterable[int]) -> Batch:
        """The blocks that the sequence numbers `positions` read."""
        return _joined(
            [self._parts[source].rows([index]) for source, index in (self.place(seed, i) for i in positions)]
        )

    def draw(self, seed: int, count: int) -> Batch:
        """At most `count` blocks from all over the text: each source, in proportion to the weights, is cut into
        stretches of one length, and of each a block is drawn. A pure function."""
        random = np.random.default_rng([seed, 0, 0, 2])  # apart from the draws of `order.py`
        stretches = self._stretches(count)
        return _joined(
            [self._parts[source].rows([int(random.integers(start, end))]) for source, start, end in stretches]
        )

    def batches(self, batch_size: int, num_blocks: int) -> Iterator[Batch]:
        """At most `num_blocks` blocks spread evenly over each source, (≤ batch_size, sequence_length) each."""
        chosen = self._spread(num_blocks)
        for start in range(0, len(chosen), batch_size):
            yield _joined([self._parts[source].rows([i]) for source, i in chosen[start : start + batch_size]])

    def prompts(self, count: int) -> list[Tensor]:
        """At most `count` beginnings of blocks spread evenly over each source, see `Blocks.prompt`."""
        return [self._parts[source].prompt(index) for source, index in self._spread(count)]

    def _spread(self, num_blocks: int) -> list[tuple[int, int]]:
        return [(source, start) for source, start, _ in self._stretches(num_blocks)]

    def _stretches(self, num_blocks: int) -> list[tuple[int, int, int]]:
        """(source, first block, block after the last) of at most `num_blocks` even parts of the text."""
        shares = allot(min(num_blocks, len(self)), self._weights)
        counts = [min(share, len(part)) for share, part in zip(shares, self._parts, strict=True)]
        sizes = [len(part) for part in self._parts]
        edges = [[i * size // count for i in range(count + 1)] for size, count in zip(sizes, counts, strict=True)]
        return [(s, start, end) for s, ends in enumerate(edges) for start, end in itertools.pairwise(ends)]


def _joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all; all have positions, or none."""
    positions = [batch.position_ids for batch in batches if batch.position_ids is not None]
    ids, labels = [batch.input_ids for batch in batches], [batch.labels for batch in batches]
    return Batch(torch.cat(ids), torch.cat(labels), torch.cat(positions) if positions else None)
