"""Documents: the text of one source.

Every document belongs to a *group* (a module or package of the standard library, a file, a text, a prompt), which is
trained on or held out as a whole, see `splits.py`.
"""

import itertools
import math
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from train.bad_rows import TOO_DEEP, BadRowError, BadRows, check_characters
from train.errors import ConfigError, TrainingError
from train.messages import Message, conversation, flatten, opening
from train.rows import Row, read_rows
from train.splits import HELD_OUT, SPLITS, Document, hash_share, put_on_sides
from train.text_config import SourceConfig

# Not code somebody wrote to be read: tests, generated tables, and what was installed beside the library.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__"),
    *("site-packages", "dist-packages", "encodings", "pydoc_data"),
}
_SKIPPED_PREFIX = "_sysconfigdata"


def read_documents(
    source: SourceConfig,
    held_out: float,
    bad: BadRows,
    needs_answers: bool = True,
    moved: Mapping[float, str] | None = None,
) -> Iterator[Document]:
    """The documents of `source` with their splits, without empty ones, `source.max_documents` at most of either part.

    A share of `source` is held out, or what `eval_path` or `eval_split` names: one half of that for validation,
    one for test; but for groups that were `moved` (see `splits.Groups`). Conversations and prompts without an answer
    are documents if `needs_answers` is false.

    Raises `ConfigError` for a prompt_column alone where they are not, `TrainingError` for missing or unreadable
    files, an unknown dataset or column, too many unusable rows, and a source without text.
    """
    if needs_answers and source.prompt_column is not None and source.completion_column is None:
        raise ConfigError("data.prompt_column is given alone; training needs completion_column, too")
    has_eval = bool(source.eval_path) or source.eval_split is not None
    share, may_be = (0.0, SPLITS[:1]) if has_eval else (held_out, SPLITS)
    count = 0
    for document in put_on_sides(_read_part(source, bad, needs_answers), share, may_be, moved or {}):
        yield document
        count += 1
    if count == 0:
        empty = f"the data set is empty: no document of {describe(source)} holds any text"
        raise TrainingError(": ".join(filter(None, (empty, bad.report()))))
    if has_eval:  # half and half: 0.5 leaves nothing to train on
        yield from put_on_sides(_read_part(source, bad, needs_answers, held_out=True), 0.5, HELD_OUT, moved or {})


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
    return itertools.islice(documents, source.max_documents)


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
        if text.strip():
            yield Document(text, path.as_posix(), path.parts[0].removesuffix(".py"))


def _documents_of_rows(source: SourceConfig, bad: BadRows, needs_answers: bool, held_out: bool) -> Iterator[Document]:
    first = True
    for row in read_rows(source, bad, held_out):
        if first and not row.is_file:
            _check_columns(row, source)
            first = False
        try:
            if row.is_file:
                document = Document(row.values["text"], row.name, row.name, is_file=True)
            else:
                document = to_document(row, source, needs_answers)
        except (BadRowError, RecursionError) as error:
            bad.add(row.name, str(error) if isinstance(error, BadRowError) else TOO_DEEP)
            continue
        if document.text.strip():
            yield document
        else:
            bad.add_empty()


def _check_columns(row: Row, source: SourceConfig) -> None:
    """Raise `TrainingError` if the first row lacks a column: then it is the setting that is wrong, not the row."""
    for setting, column in source.columns.items():
        if column not in row.values:
            raise TrainingError(
                f"data.{setting} is {column!r}; {row.name.rpartition(':')[0]} has {', '.join(map(str, row.values))}"
            )


def to_document(row: Row, source: SourceConfig, needs_answers: bool = True) -> Document:
    """A row as a document, empty if it says nothing, or answers nothing where it must.

    Its group is `group_column`, else the prompt or text itself, so that rows which say the same stay on one side.
    Raises `BadRowError` for a column that is not there or holds something else.
    """
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
            prompt = _text(prompt, source.prompt_column)
            answer = _text(answer, str(source.completion_column)) if answer is not None else ""
            text, prompt_length = prompt + answer if answer.strip() or not needs_answers else "", len(prompt)
    else:
        text = _text(row.values[source.text_column], source.text_column)
    if messages:
        text = flatten(messages)
    group = opening(messages) if messages else text[:prompt_length] or text
    if source.group_column is not None:
        group = str(row.values[source.group_column])
        check_characters(group, source.group_column)
    return Document(text, row.name, group, "train", messages, prompt_length)


def _text(value: object, column: str) -> str:
    """A column's text; numbers are text too. Raises `BadRowError` for lists, mappings, truth values and what a table
    puts where nothing is (NaN)."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRowError(f"has {type(value).__name__} in {column!r}, not text")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRowError(f"has {value} in {column!r}, not text")
    check_characters(str(value), column)
    return str(value)
