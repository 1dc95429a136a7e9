"""Files that are whole or as they were before: written beside, then renamed into place. Imports nothing heavy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` when the block ends, and the disk holds it.

    An error, or a crash at any moment, leaves `path` as it was; an error leaves nothing beside it, either.
    """
    partial = path.with_suffix(".partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> Path:
    """Write a text file, whole or not at all; returns it."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def write_json(path: Path, record: dict[str, Any]) -> Path:
    """The same of a record."""
    return write_whole(path, json.dumps(record, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The record in a file that `write_json` wrote; empty if there is none."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record
