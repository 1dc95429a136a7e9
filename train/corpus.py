"""Where the text comes from, and which of it is held out.

Every document belongs to a *group* (a module or package of the standard library, a file, a document of a Hub
dataset). A stable hash of the group's name decides whether it is trained on, used to choose settings
("validation") or only reported ("test"): siblings never sit on two sides, and more documents never move an
old one.
"""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from train.config import DataConfig
from train.errors import TrainingError, first_line

SPLITS = ("train", "validation", "test")

# Not code somebody wrote to be read: tests, generated tables, and what was installed beside the library.
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__"),
    *("site-packages", "dist-packages", "encodings", "pydoc_data"),
}
_SKIPPED_PREFIX = "_sysconfigdata"
_TEXT_SUFFIXES = {".txt", ".md", ".py"}


class Document(NamedTuple):
    """One text and where it is from."""

    text: str
    name: str  # unique in the corpus: a path, or `path:line`, or `dataset:index`
    group: str  # documents of one group stay on one side of the split


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on nothing but `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of(group: str, held_out: float) -> str:
    """The split of a group; "test" and "validation" each get the share `held_out` of all, in expectation."""
    share = hash_share(group)
    return "test" if share < held_out else "validation" if share < 2 * held_out else "train"


def read_documents(data: DataConfig) -> Iterator[Document]:
    """The documents that `data` names, without empty ones, `data.max_documents` at most.

    Raises `TrainingError` for missing or unreadable files, an unknown dataset or column, and an empty corpus.
    """
    if data.standard_library:
        documents = _standard_library(data.max_documents)
    elif data.path:
        documents = _local_files(data)
    else:
        documents = _hub_dataset(data)
    count = 0
    for document in documents:
        if document.text.strip():
            yield document
            count += 1
        if count == data.max_documents:
            return
    if count == 0:
        raise TrainingError("the data set is empty: no document of data.path or data.dataset holds any text")


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


def _local_files(data: DataConfig) -> Iterator[Document]:
    """Files in the order of their names; a text file, or a line of a .jsonl, is a document and a group."""
    paths: list[Path] = []
    for pattern in data.path:
        found = sorted(Path(name) for name in glob.glob(str(Path(pattern).expanduser()), recursive=True))
        found = [path for path in found if path.is_file()]
        if not found:
            raise TrainingError(f"data.path: no file matches {pattern!r}; give a file or a glob such as 'docs/**/*.md'")
        paths.extend(found)
    for path in dict.fromkeys(paths):  # once, however many patterns match it
        if path.suffix == ".jsonl":
            yield from _jsonl(path, data.text_column)
        elif path.suffix in _TEXT_SUFFIXES:
            yield Document(_read_text(path), path.as_posix(), path.as_posix())
        else:
            raise TrainingError(f"data.path: cannot read {path}; known are .jsonl, {', '.join(sorted(_TEXT_SUFFIXES))}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"data.path: {path} is not UTF-8 (byte {error.start}); convert it or leave it out"
        ) from None


def _jsonl(path: Path, text_column: str) -> Iterator[Document]:
    """One document a line. Its group is the text itself: a line that occurs twice stays on one side."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_column]
            except (json.JSONDecodeError, KeyError, TypeError):
                raise TrainingError(
                    f"data.path: line {number} of {path} is no JSON object with the key {text_column!r}; "
                    "data.text_column names the key"
                ) from None
            yield Document(str(text), f"{path.as_posix()}:{number}", str(text))


def _hub_dataset(data: DataConfig) -> Iterator[Document]:
    """A dataset of the Hub (or a local folder that `datasets` knows); grouped by the text, as in `_jsonl`."""
    import datasets

    assert data.dataset is not None
    limited = data.max_documents is not None  # streamed, so that only these documents are downloaded
    try:
        rows = datasets.load_dataset(data.dataset, data.subset, split=data.split, streaming=limited)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TrainingError(f"data.dataset: cannot load {data.dataset!r}: {first_line(error)}") from None
    columns = rows.column_names
    if columns is not None and data.text_column not in columns:
        raise TrainingError(f"data.text_column is {data.text_column!r}; {data.dataset} has {', '.join(columns)}")
    for index, row in enumerate(rows):
        text = str(row[data.text_column])
        yield Document(text, f"{data.dataset}:{index}", text)
