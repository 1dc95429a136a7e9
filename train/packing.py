"""From documents to blocks of tokens, and the order in which training reads them.

A split is one long file of token ids: every document's tokens, an end-of-text token after each. Block i is
tokens [i·T, (i+1)·T); only the tail shorter than a block is never read. Files are memory-mapped, so size is
no matter.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from train.corpus import SPLITS, Document, split_of
from train.errors import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DOCUMENTS_PER_CALL = 256  # given to the tokenizer at once, which then uses its own threads


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def encode(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Ids of each text with the tokenizer's own special tokens, an end-of-text token last, never two."""
    eos = tokenizer.eos_token_id
    # verbose=False: a document longer than the model's positions is no mistake, it is cut into blocks.
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    return [ids if ids and ids[-1] == eos else [*ids, eos] for ids in encoded]


def write_tokens(
    documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase", held_out: float, folder: Path
) -> dict[str, int]:
    """Write `<split>.bin` for each split into `folder`; returns the number of tokens of each."""
    dtype = token_dtype(len(tokenizer))
    files: dict[str, BinaryIO] = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    try:
        for batch in _batched(documents, _DOCUMENTS_PER_CALL):
            for document, ids in zip(batch, encode([d.text for d in batch], tokenizer), strict=True):
                split = split_of(document.group, held_out)
                files[split].write(np.asarray(ids, dtype=dtype).tobytes())
                counts[split] += len(ids)
    finally:
        for file in files.values():
            file.close()
    return counts


def _batched(items: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Lists of `size` items, the last one shorter (itertools.batched comes with Python 3.12)."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


class Blocks:
    """The blocks of one split: `len(blocks)` of them, each `sequence_length` tokens."""

    def __init__(self, path: Path, dtype: np.dtype[Any], sequence_length: int) -> None:
        """Map the token file `path`. Raises `TrainingError` if it does not hold a single block."""
        size = path.stat().st_size // dtype.itemsize
        if size < sequence_length:
            raise TrainingError(
                f"the {path.stem} text has {size} tokens, data.sequence_length is {sequence_length}: "
                "lower it, give more text, or raise data.held_out" + (" less" if path.stem == "train" else "")
            )
        tokens = np.memmap(path, dtype=dtype, mode="r")
        self._blocks = tokens[: size // sequence_length * sequence_length].reshape(-1, sequence_length)

    def __len__(self) -> int:
        return int(self._blocks.shape[0])

    def rows(self, indices: Iterable[int]) -> torch.Tensor:
        """The blocks `indices` as input ids, int64 (len(indices), sequence_length)."""
        return torch.from_numpy(self._blocks[list(indices)].astype(np.int64))

    def batches(self, batch_size: int, num_blocks: int) -> Iterator[torch.Tensor]:
        """`num_blocks` blocks spread evenly over the split, int64 (≤ batch_size, sequence_length) each."""
        count = min(num_blocks, len(self))
        chosen = [i * len(self) // count for i in range(count)]
        for start in range(0, count, batch_size):
            yield self.rows(chosen[start : start + batch_size])


@lru_cache(maxsize=2)  # a batch may lie across two epochs
def _permutation(seed: int, epoch: int, num_blocks: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(num_blocks)


def block_index(seed: int, position: int, num_blocks: int) -> int:
    """The block that the run's sequence number `position` reads: a pure function, so that resuming is exact.

    Every epoch (num_blocks positions) visits each block once, in an order drawn from (seed, epoch).
    """
    epoch, offset = divmod(position, num_blocks)
    return int(_permutation(seed, epoch, num_blocks)[offset])


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
