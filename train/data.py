"""The run's data: tokenizer, packed tokens and prompts, made once and read by every process."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train.config import TrainConfig
from train.corpus import SPLITS, Document, read_documents, split_of
from train.errors import TrainingError
from train.packing import Blocks, token_dtype, write_tokens
from train.prompts import choose_prompts, write_prompts
from train.vocabulary import build_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELD_OUT = SPLITS[1:]
_DOCUMENTS_FOR_PROMPTS = 256  # of each held-out split: enough variety, little memory


@dataclass(frozen=True)
class Data:
    """What training reads."""

    tokenizer: "PreTrainedTokenizerBase"
    train: Blocks
    validation: Blocks  # chooses exit_layer and num_draft_tokens
    test: Blocks  # is only reported


def prepare_data(config: TrainConfig) -> dict[str, int]:
    """Write tokenizer/, data/ and prompts/ into the run folder unless there; returns tokens per split.

    Called by one process. The same run always finds the same files, so a resumed run reads the tokens it
    began with, whatever has become of the text since. Raises `TrainingError` for text that cannot be used.
    """
    folder = config.run.folder
    manifest = folder / "data" / "manifest.json"  # written last: its presence says that all is there
    if manifest.is_file():
        counts: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["tokens"]
        return counts
    tokenizer = build_tokenizer(config, _training_texts(config))
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest.parent.mkdir(exist_ok=True)
    held_out: dict[str, list[Document]] = {split: [] for split in _HELD_OUT}
    documents = _keep_held_out(read_documents(config.data), config.data.held_out, held_out)
    counts = write_tokens(documents, tokenizer, config.data.held_out, manifest.parent)
    _check_counts(counts, config)
    for split, kept in held_out.items():
        write_prompts(choose_prompts(kept, tokenizer), folder / "prompts" / f"{split}.jsonl")
    manifest.write_text(json.dumps({"tokens": counts, "vocab_size": len(tokenizer)}) + "\n", encoding="utf-8")
    return counts


def open_data(config: TrainConfig) -> Data:
    """The data that `prepare_data` wrote. Raises `TrainingError` if a split does not hold a single block."""
    folder = config.run.folder
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    dtype: np.dtype = token_dtype(len(tokenizer))  # type: ignore[type-arg]
    splits = {split: Blocks(_token_file(folder, split), dtype, config.data.sequence_length) for split in SPLITS}
    return Data(tokenizer, **splits)


def _token_file(folder: Path, split: str) -> Path:
    return folder / "data" / f"{split}.bin"


def _training_texts(config: TrainConfig) -> Iterator[str]:
    """The texts a tokenizer may be trained on: held-out text is not among them."""
    for document in read_documents(config.data):
        if split_of(document.group, config.data.held_out) == "train":
            yield document.text


def _keep_held_out(
    documents: Iterable[Document], held_out: float, kept: dict[str, list[Document]]
) -> Iterator[Document]:
    """Pass the documents on, and put the first held-out ones into `kept`."""
    for document in documents:
        split = split_of(document.group, held_out)
        if split in kept and len(kept[split]) < _DOCUMENTS_FOR_PROMPTS:
            kept[split].append(document)
        yield document


def _check_counts(counts: dict[str, int], config: TrainConfig) -> None:
    """Raise `TrainingError` if chance (or too few sources) left a split without text."""
    empty = [split for split, count in counts.items() if count == 0]
    if empty:
        raise TrainingError(
            f"no text for {' and '.join(empty)}: the sources are too few for data.held_out="
            f"{config.data.held_out}; give more files (text is held out by whole files, or "
            "lines of a .jsonl) or change data.held_out"
        )
