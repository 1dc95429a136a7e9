"""The draft vocabulary that a run leaves: the tokens that are most frequent in what it learnt to write.

Counted in the run's own token files: of each source the tokens that are learnt (of a conversation its answers), in
the source's share of the mixture. Where the model wrote text of its own, that counts as much as all the sources
together, since drafts are of what it says itself.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerskip.checkpoint.vocabulary import coverage, most_frequent
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.model.draft_head import with_draft_head
from train.config import TrainConfig
from train.data import source_folder
from train.own_text import find_own_text
from train.packing import TARGET, token_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENS_AT_ONCE = 2**24
_UNITS = 2**40  # counts of several files are made comparable, and stay whole numbers


class DraftVocabulary(NamedTuple):
    """A draft vocabulary, and how much of the held-out test text it covers (0 to 1)."""

    token_ids: Tensor  # (n,) int64, ascending
    coverage: float


def choose_draft_vocabulary(
    config: TrainConfig, tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", check_head: bool = True
) -> DraftVocabulary | None:
    """The `data.draft_vocabulary` most frequent tokens, and the special ones; None if it is null.

    Args:
        check_head: whether to see that the model's head can be cut; of a sharded one that cannot be seen.

    Raises:
        UnsupportedModelError: if the model's head cannot be cut to it.
    """
    size = config.data.draft_vocabulary
    if size is None:
        return None
    ends = model.generation_config.eos_token_id
    always = {*tokenizer.all_special_ids, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}
    counts = _share(_count_sources(config, "train", len(tokenizer)))
    own = find_own_text(config)
    if own is not None:
        counts += _share(count_tokens(own, len(tokenizer)).double())
    token_ids = most_frequent((counts * _UNITS).round().long(), max(size, len(always)), always)
    if check_head:
        with_draft_head(model, model, token_ids)
    held_out = (_share(_count_sources(config, "test", len(tokenizer))) * _UNITS).round().long()
    return DraftVocabulary(token_ids, coverage(held_out, token_ids))


def record_of(found: "DraftVocabulary | UnsupportedModelError | None", config: TrainConfig) -> dict[str, Any] | None:
    """For evaluation.json; None where none was asked for."""
    if found is None:
        return None
    if isinstance(found, DraftVocabulary):
        return {"size": config.data.draft_vocabulary, "coverage": round(found.coverage, 6)}
    return {"size": config.data.draft_vocabulary, "error": str(found)}


def count_tokens(path: Path, vocab_size: int) -> Tensor:
    """How often each token is learnt in a token file; without marks all of it is. (vocab,) int64."""
    tokens = np.memmap(path, dtype=token_dtype(vocab_size), mode="r")
    marks = path.with_suffix(".marks")
    learnt = np.memmap(marks, dtype=np.uint8, mode="r") if marks.is_file() else None
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = tokens[first : first + _TOKENS_AT_ONCE]
        if learnt is not None:
            some = some[(learnt[first : first + _TOKENS_AT_ONCE] & TARGET).astype(bool)]
        counts += np.bincount(some, minlength=vocab_size)
    return torch.from_numpy(counts)


def _count_sources(config: TrainConfig, split: str, vocab_size: int) -> Tensor:
    """Float64 (vocab,): each source's counts, in the share of the mixture that its weight gives it."""
    total = torch.zeros(vocab_size, dtype=torch.float64)
    for number, source in enumerate(config.data.all_sources):
        path = source_folder(config, number) / f"{split}.bin"
        if path.stat().st_size:
            total += _share(count_tokens(path, vocab_size).double()) * source.weight
    return total


def _share(counts: Tensor) -> Tensor:
    """(vocab,) float64 that adds up to 1, or is 0 where nothing was counted."""
    return counts / counts.sum().clamp(min=1e-300)
