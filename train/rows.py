"""Rows of files and of Hugging Face datasets, one after the other, in an order that never changes.

Text files, .jsonl and .csv are read here, row by row, so that one that cannot be read is known by its number and
does not take the others with it; .parquet and datasets by `datasets`.
"""

import csv
import glob
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train.bad_rows import TOO_DEEP, BadRows
from train.errors import ConfigError, TrainingError, first_line
from train.text_config import SourceConfig

_TEXT_SUFFIXES = (".md", ".py", ".txt")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (*_DELIMITERS, ".jsonl", ".parquet", *_TEXT_SUFFIXES)


class Row(NamedTuple):
    """One row: its columns by name."""

    values: Mapping[str, Any]
    name: str  # `path:line`, `path:index`, `dataset:index`, or the path of a text file
    is_file: bool = False  # a whole text file, under the column "text"


def read_rows(source: SourceConfig, bad: BadRows, held_out: bool = False) -> Iterator[Row]:
    """The rows of `source`, or of its `eval_path` or `eval_split` if `held_out`.

    Rows that cannot be parsed go to `bad`. Raises `TrainingError` for files and datasets that are not there or
    cannot be read.
    """
    if source.dataset is not None:
        return _dataset(source, source.eval_split or source.split if held_out else source.split)
    setting, patterns = ("data.eval_path", source.eval_path) if held_out else ("data.path", source.path)
    return _files(setting, _paths(setting, patterns), bad)


def check_held_out(sources: Sequence[SourceConfig]) -> None:
    """Raise `ConfigError` for a file that a source holds out and one of them trains on, under whatever name.

    Raises `TrainingError` for files that are not there.
    """
    trained_on = [path for source in sources for path in _paths("data.path", source.path)]
    files = {(stat.st_dev, stat.st_ino) for stat in map(os.stat, trained_on)}  # links have names of their own
    for path in (path for source in sources for path in _paths("data.eval_path", source.eval_path)):
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) in files:
            raise ConfigError(f"data.eval_path has {path}, which data.path has, too: take it out of one of them")


def _paths(setting: str, patterns: tuple[str, ...]) -> list[Path]:
    """The files in the order of the patterns, then of their names, once each."""
    paths: list[Path] = []
    for pattern in patterns:
        found = sorted(Path(name) for name in glob.glob(str(Path(pattern).expanduser()), recursive=True))
        found = [path for path in found if path.is_file()]
        if not found:
            raise TrainingError(f"{setting}: no file matches {pattern!r}; give a file or a glob such as 'docs/**/*.md'")
        paths.extend(found)
    for path in paths:
        try:
            path.as_posix().encode()
        except UnicodeEncodeError:  # a row's name goes into files and messages, and decides on its split
            name = os.fsencode(path)
            raise TrainingError(f"{setting}: the name of {name!r} is not UTF-8; rename it or leave it out") from None
        if path.suffix not in _SUFFIXES:
            raise TrainingError(f"{setting}: cannot read {path}; known are {', '.join(_SUFFIXES)}")
    return list(dict.fromkeys(paths))


def _files(setting: str, paths: list[Path], bad: BadRows) -> Iterator[Row]:
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _jsonl(path, bad)
        elif path.suffix in _DELIMITERS:
            yield from _csv(path, bad, setting)
        elif path.suffix == ".parquet":
            yield from _from_datasets(setting, path.as_posix(), "parquet", data_files=str(path), split="train")
        else:
            yield Row({"text": _read_text(path, setting)}, path.as_posix(), is_file=True)


def _read_text(path: Path, setting: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"{setting}: {path} is not UTF-8 (byte {error.start}); convert it or leave it out"
        ) from None


def _jsonl(path: Path, bad: BadRows) -> Iterator[Row]:
    """The objects of a file of JSON lines, named by line from 1."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            name = f"{path.as_posix()}:{number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError:  # no JSON, or bytes that are no UTF-8
                bad.add(name, "is no JSON")
                continue
            except RecursionError:
                bad.add(name, TOO_DEEP)
                continue
            if isinstance(values, dict):
                yield Row(values, name)
            else:
                bad.add(name, f"is a JSON {type(values).__name__}, not an object")


def _csv(path: Path, bad: BadRows, setting: str) -> Iterator[Row]:
    """The rows of a table with a header, named by row from 1, the header not counted."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a whole document
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=_DELIMITERS[path.suffix], strict=True)
            for number, values in enumerate(rows, start=1):
                name = f"{path.as_posix()}:{number}"
                if None in values:  # where DictReader keeps what is over
                    bad.add(name, "has more fields than the header")
                else:
                    yield Row(values, name)
    except UnicodeDecodeError as error:
        raise TrainingError(f"{setting}: {path} is not UTF-8 ({error.reason}); convert it or leave it out") from None
    except csv.Error as error:
        raise TrainingError(f"{setting}: {path} is no table that can be read ({error}); mend it") from None


def _dataset(source: SourceConfig, split: str) -> Iterator[Row]:
    """A dataset of the Hub, or a local folder that `datasets` knows."""
    assert source.dataset is not None
    # Limited in number it is streamed, so that only these documents are downloaded.
    streaming = source.max_documents is not None if source.streaming is None else source.streaming
    where = ("data.dataset", source.dataset, source.dataset)
    return _from_datasets(*where, streaming=streaming, name=source.subset, split=split)


def _from_datasets(setting: str, label: str, path: str, streaming: bool = True, **options: Any) -> Iterator[Row]:
    """Rows by `datasets.load_dataset(path, ...)`, named `label:index` from 0."""
    import datasets

    try:
        for index, values in enumerate(datasets.load_dataset(path, streaming=streaming, **options)):
            yield Row(values, f"{label}:{index}")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TrainingError(f"{setting}: cannot load {label!r}: {first_line(error)}") from None
