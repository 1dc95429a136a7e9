"""Small files that are whole or as they were before."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write through a temporary file: a crash leaves the old one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """The same, as indented JSON."""
    write_text(path, json.dumps(record, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file that `write_json` wrote; empty if there is none."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record
