"""From documents to files of tokens, and of marks beside them.

A split of a source is one long file of token ids, `<split>.bin`, and one of a byte a token, `<split>.marks`, that
says which tokens are learnt and where documents begin. Block i is tokens [i·T, (i+1)·T), see `blocks.py`.

Text is joined without a gap, an end-of-text token after each document: nothing but the last tail is lost. Prompts
with answers are not cut, since half an answer without its prompt teaches little: each goes into the open block that
it fits best, and what is left of a block is padding, which is not learnt.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from train.bad_rows import BadRowError, BadRows
from train.chat import ChatTemplate, Encoded
from train.disk import writing_alone
from train.splits import SPLITS, Document, Groups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TARGET, START = 1, 2  # bits of a mark: the token is learnt; a document begins at it

_DOCUMENTS_PER_CALL = 256  # given to the tokenizer at once, which then uses its own threads
_OPEN_BLOCKS = 64  # blocks with room left, in which the next answer may go


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def encode(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Ids of each text with the tokenizer's own special tokens, an end-of-text token last, never two."""
    eos = tokenizer.eos_token_id
    # verbose=False: a document longer than the model's positions is no mistake, it is cut into blocks.
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    return [ids if ids and ids[-1] == eos else [*ids, eos] for ids in encoded]


def encode_documents(
    documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate | None, bad: BadRows
) -> Iterator[tuple[Document, Encoded]]:
    """Each document with its tokens; conversations that `template` cannot render go to `bad`."""
    for batch in _batched(documents, _DOCUMENTS_PER_CALL):
        plain = [document.text for document in batch if not document.messages and not document.prompt_length]
        encoded = iter(encode(plain, tokenizer) if plain else [])
        for document in batch:
            if document.messages:
                assert template is not None
                try:
                    yield document, template.encode(document.messages)
                except BadRowError as error:
                    bad.add(document.name, str(error))
            elif document.prompt_length:
                yield document, _encode_pair(document, tokenizer)
            else:
                ids = next(encoded)
                yield document, Encoded(ids, [True] * len(ids))


def _encode_pair(document: Document, tokenizer: "PreTrainedTokenizerBase") -> Encoded:
    """Prompt and completion, tokenized apart as they are when decoding; the completion is learnt, and its end."""
    eos = tokenizer.eos_token_id
    prompt = tokenizer(document.text[: document.prompt_length], verbose=False)["input_ids"]
    prompt = prompt[:-1] if prompt and prompt[-1] == eos else prompt
    completion = tokenizer(document.text[document.prompt_length :], add_special_tokens=False, verbose=False)
    ids = [*completion["input_ids"], eos]
    return Encoded([*prompt, *ids], [False] * len(prompt) + [True] * len(ids))


class Written(NamedTuple):
    """What `write_tokens` did with one source."""

    tokens: dict[str, int]  # by split
    num_cut: int  # documents longer than a block, of which the end is not read
    num_lost: int  # those of which nothing is left to learn: they are left out


def write_tokens(
    encoded: Iterable[tuple[Document, Encoded]],
    dtype: np.dtype[Any],
    folder: Path,
    block: int | None = None,
    padding: int = 0,
    groups: Groups | None = None,
) -> Written:
    """Write `<split>.bin` and `<split>.marks` for each split into `folder`.

    Args:
        encoded: documents with their tokens.
        dtype: of the token file.
        block: the block's length, if documents are to stay whole (longer ones are cut to it); None joins them.
        padding: id of the tokens that fill blocks.
        groups: is told of each document that is written.

    Raises `LocalError` if they cannot be written.
    """
    with writing_alone(folder):
        folder.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(SPLITS, 0)
    num_cut = num_lost = 0
    with ExitStack() as stack:
        packers = {split: None if block is None else BestFit(block, padding) for split in SPLITS}
        opened = {split: _TokenFile(folder / f"{split}.bin", dtype, packers[split]) for split in SPLITS}
        files = {split: stack.enter_context(closing(file)) for split, file in opened.items()}
        for document, (ids, targets) in encoded:
            num_cut += block is not None and len(ids) > block
            if not any(targets[:block]):
                num_lost += 1
                continue
            files[document.split].add(ids, targets)
            counts[document.split] += len(ids[:block])
            if groups is not None:
                groups.add(document, len(ids[:block]))
    return Written(counts, num_cut, num_lost)


class _TokenFile:
    """A file of tokens and the file of marks beside it."""

    def __init__(self, path: Path, dtype: np.dtype[Any], packer: "BestFit | None") -> None:
        """With a `packer` documents stay whole."""
        self._path, self._dtype, self._packer = path, dtype, packer
        with writing_alone(path):
            self._tokens: BinaryIO = path.open("wb")
            self._marks: BinaryIO = path.with_suffix(".marks").open("wb")

    def add(self, ids: list[int], targets: list[bool]) -> None:
        """Write a document, or keep it until its block is full."""
        marks = [TARGET * target for target in targets]
        marks[0] |= START
        self._write([(ids, marks)] if self._packer is None else self._packer.add(ids, marks))

    def _write(self, rows: list[tuple[list[int], list[int]]]) -> None:
        with writing_alone(self._path):
            for ids, marks in rows:
                self._tokens.write(np.asarray(ids, dtype=self._dtype).tobytes())
                self._marks.write(bytes(marks))

    def close(self) -> None:
        """Write the blocks that are still open, and close both files."""
        with writing_alone(self._path), self._tokens, self._marks:
            if self._packer is not None:
                self._write(self._packer.close())


class BestFit:
    """Puts whole documents into blocks: each into the open block that it leaves least room in."""

    def __init__(self, length: int, padding: int) -> None:
        self._length, self._padding = length, padding
        self._open: list[tuple[list[int], list[int]]] = []  # ids and marks of blocks that are not full, oldest first

    def add(self, ids: list[int], marks: list[int]) -> list[tuple[list[int], list[int]]]:
        """Place a document, cut to a block's length; returns the blocks that are done, none or one."""
        ids, marks = ids[: self._length], marks[: self._length]
        fitting = [row for row in self._open if len(row[0]) + len(ids) <= self._length]
        row = max(fitting, key=lambda row: len(row[0]), default=None)
        if row is None:
            row = ([], [])
            self._open.append(row)
        row[0].extend(ids)
        row[1].extend(marks)
        if len(row[0]) == self._length or len(self._open) > _OPEN_BLOCKS:
            done = max(self._open, key=lambda row: len(row[0]))
            self._open = [row for row in self._open if row is not done]
            return [self._filled(done)]
        return []

    def close(self) -> list[tuple[list[int], list[int]]]:
        """The blocks that are still open."""
        rows, self._open = [self._filled(row) for row in self._open], []
        return rows

    def _filled(self, row: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        """The block, filled up with padding that begins a document of its own and is not learnt."""
        room = self._length - len(row[0])
        return [*row[0], *[self._padding] * room], [*row[1], *[START][:room], *[0] * (room - 1)]


def _batched(items: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Lists of `size` items, the last one shorter (itertools.batched comes with Python 3.12)."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
