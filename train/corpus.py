"""Documents: the text of one source, and which of it is held out.

Every document belongs to a *group* (a module or package of the standard library, a file, a text, a prompt). A
stable hash of the group's name decides whether it is trained on, used to choose settings ("validation") or only
reported ("test"): siblings never sit on two sides, and more documents never move an old one. Of one text file alone
the end is held out.
"""

import hashlib
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from train.bad_rows import BadRowError, BadRows
from train.errors import ConfigError, TrainingError
from train.messages import Message, conversation, flatten, opening
from train.rows import Row, read_rows
from train.text_config import SourceConfig

SPLITS = ("train", "validation", "test")

# Not code somebody wrote to be read: tests, generated tables, and what was installed beside the library.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__"),
    *("site-packages", "dist-packages", "encodings", "pydoc_data"),
}
_SKIPPED_PREFIX = "_sysconfigdata"


class Document(NamedTuple):
    """One text and where it is from."""

    text: str  # of a conversation: what is said in it
    name: str  # unique in the source: a path, or `path:line`, or `dataset:index`
    group: str  # documents of one group stay on one side of the split
    split: str = "train"  # one of SPLITS
    messages: tuple[Message, ...] = ()  # a conversation, for the chat template
    prompt_length: int = 0  # characters at the beginning of `text` that are given, not learnt
    is_file: bool = False  # a whole text file


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on nothing but `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of(group: str, held_out: float) -> str:
    """The split of a group; "test" and "validation" each get the share `held_out` of all, in expectation."""
    share = hash_share(group)
    return "test" if share < held_out else "validation" if share < 2 * held_out else "train"


def read_documents(
    source: SourceConfig, held_out: float, bad: BadRows, needs_answers: bool = True
) -> Iterator[Document]:
    """The documents of `source` with their splits, without empty ones, `source.max_documents` at most of either part.

    A share of `source` is held out, or what `eval_path` or `eval_split` names: one half of that for validation,
    one for test. Conversations and prompts without an answer are documents if `needs_answers` is false.

    Raises `ConfigError` for a prompt_column alone where they are not, `TrainingError` for missing or unreadable
    files, an unknown dataset or column, too many unusable rows, and a source without text.
    """
    if needs_answers and source.prompt_column is not None and source.completion_column is None:
        raise ConfigError("data.prompt_column is given alone; training needs completion_column, too")
    has_eval = bool(source.eval_path) or source.eval_split is not None
    count = 0
    for document in _split(_read_part(source, bad, needs_answers), 0.0 if has_eval else held_out):
        yield document
        count += 1
    if count == 0:
        raise TrainingError(f"the data set is empty: no document of {describe(source)} holds any text")
    if has_eval:  # half and half: 0.5 leaves nothing to train on
        yield from _split(_read_part(source, bad, needs_answers, held_out=True), 0.5)


def _split(documents: Iterator[Document], held_out: float) -> Iterator[Document]:
    """Every document on its side; one text file alone is cut, for it could be on one only."""
    first = list(itertools.islice(documents, 2))
    if len(first) == 1 and first[0].is_file and held_out:
        yield from _cut(first[0], held_out)
        return
    for document in itertools.chain(first, documents):
        yield document._replace(split=split_of(document.group, held_out))


def _cut(file: Document, held_out: float) -> Iterator[Document]:
    """What to train on, `held_out` of it for validation, and its end for test; cut between lines, if it has any."""
    text, places = file.text, [0]
    for place in (round(len(text) * (1 - n * held_out)) for n in (2, 1)):
        places.append(text.find("\n", place - 1) + 1 or place if place else 0)
    for split, start, end in zip(SPLITS, places, [*places[1:], len(text)], strict=True):
        if text[start:end].strip():
            name = f"{file.name} ({split})"
            yield Document(text[start:end], name, name, split, is_file=True)


def describe(source: SourceConfig) -> str:
    """A source in a few words, for messages."""
    if source.standard_library:
        return "data.standard_library"
    return f"data.dataset={source.dataset}" if source.dataset else f"data.path={','.join(source.path)}"


def _read_part(source: SourceConfig, bad: BadRows, needs_answers: bool, held_out: bool = False) -> Iterator[Document]:
    if source.standard_library:
        documents = _standard_library(source.max_documents)
    else:
        documents = _documents_of_rows(source, bad, needs_answers, held_out)
    count = 0
    for document in documents:
        if document.text.strip():
            yield document
            count += 1
        if count == source.max_documents:
            return


def _standard_library(max_documents: int | None) -> Iterator[Document]:
    """The sources of the Python that runs this; grouped by top-level module or package."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = sorted(
        path for path in paths if not _SKIPPED_FOLDERS & set(path.parts) and not path.name.startswith(_SKIPPED_PREFIX)
    )
    if max_documents is not None:  # a few of everything rather than all that begins with "a"
        paths = sorted(paths, key=lambda path: hash_share(path.as_posix()))
    for path in paths:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # a few sources are in another encoding on purpose
            continue
        yield Document(text, path.as_posix(), path.parts[0].removesuffix(".py"))


def _documents_of_rows(source: SourceConfig, bad: BadRows, needs_answers: bool, held_out: bool) -> Iterator[Document]:
    first = True
    for row in read_rows(source, bad, held_out):
        if first and not row.is_file:
            _check_columns(row, source)
            first = False
        try:
            if row.is_file:
                yield Document(row.values["text"], row.name, row.name, is_file=True)
            else:
                yield to_document(row, source, needs_answers)
        except BadRowError as error:
            bad.add(row.name, str(error))


def _check_columns(row: Row, source: SourceConfig) -> None:
    """Raise `TrainingError` if the first row lacks a column: then it is the setting that is wrong, not the row."""
    for setting, column in source.columns.items():
        if column not in row.values:
            raise TrainingError(
                f"data.{setting} is {column!r}; {row.name.rpartition(':')[0]} has {', '.join(map(str, row.values))}"
            )


def to_document(row: Row, source: SourceConfig, needs_answers: bool = True) -> Document:
    """A row as a document. Its group is `group_column`, else the prompt or text itself, so that rows which say the
    same stay on one side. Raises `BadRowError` for a column that is not there or holds something else."""
    for column in source.columns.values():
        if row.values.get(column) is None:
            raise BadRowError(f"has no {column!r}")
    messages: tuple[Message, ...] = ()
    prompt_length = 0
    if source.messages_column is not None:
        column = source.messages_column
        messages = conversation(row.values[column], column, needs_answer=needs_answers)
    elif source.prompt_column is not None:
        prompt = row.values[source.prompt_column]
        answer = row.values[source.completion_column] if source.completion_column is not None else None
        if source.as_chat:
            messages = conversation(prompt, source.prompt_column, role="user", needs_answer=False)
            if source.completion_column is not None:
                messages += conversation(answer, source.completion_column, role="assistant")
        else:
            parts = [
                _text(prompt, source.prompt_column),
                _text(answer, str(source.completion_column)) if answer else "",
            ]
            text, prompt_length = "".join(parts), len(parts[0])
    else:
        text = _text(row.values[source.text_column], source.text_column)
    if messages:
        text = flatten(messages)
    group = opening(messages) if messages else text[:prompt_length] or text
    if source.group_column is not None:
        group = str(row.values[source.group_column])
    return Document(text, row.name, group, "train", messages, prompt_length)


def _text(value: object, column: str) -> str:
    """A column's text; numbers are text too. Raises `BadRowError` for lists and mappings."""
    if isinstance(value, str | int | float):
        return str(value)
    raise BadRowError(f"has {type(value).__name__} in {column!r}, not text")
