"""The file of answers while it is written: append-only beside the final one, so that a stop loses one line at most.

answers.jsonl.partial    first the settings it was begun with, then {"row", "record"} a line, in any order
answers.jsonl            the records in the order of their rows, moved into place when all are there
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from layerskip.checkpoint.whole_files import replacing
from train.disk import writing_alone
from train.errors import TrainingError


class Answers:
    """Rows that are answered. Use as a context manager; `finish` makes the final file."""

    def __init__(self, path: Path, fingerprint: dict[str, Any]) -> None:
        """Go on with `path`.partial, or begin it.

        Raises `TrainingError` if it was begun with other settings than `fingerprint`, or cannot be written.
        """
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._records: dict[int, dict[str, Any] | None] = {}
        self._left_out: Counter[str] = Counter()
        with writing_alone(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(fingerprint))
        whole = self._read(wanted) if self._partial.is_file() else 0
        with writing_alone(self._partial):
            self._file = self._partial.open("ab")
            self._file.truncate(whole)  # a line that was being written when it stopped
        if whole == 0:
            self._write({"settings": wanted})

    def _read(self, wanted: dict[str, Any]) -> int:
        """Take in the whole lines that are there; returns their size in bytes."""
        size = 0
        with self._partial.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    value = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    value = None
                if value is None:
                    break
                if number == 0:
                    self._compare(value["settings"], wanted)
                else:
                    self._take(value["row"], value["record"], value.get("reason", ""))
                size += len(line)
        return size

    def _compare(self, there: dict[str, Any], wanted: dict[str, Any]) -> None:
        for key in {**there, **wanted}:
            if there.get(key) != wanted.get(key):
                raise TrainingError(
                    f"{self._partial} was begun with {key} {there.get(key)!r}, here it is {wanted.get(key)!r}: "
                    "go on with the same settings, or delete it"
                )

    def _take(self, row: int, record: dict[str, Any] | None, reason: str) -> None:
        self._records[row] = record
        if record is None:
            self._left_out[reason] += 1

    def __contains__(self, row: int) -> bool:
        return row in self._records

    def add(self, row: int, record: dict[str, Any] | None, reason: str = "") -> None:
        """Write row number `row`; no record: it is left out for `reason`, and not tried again."""
        self._take(row, record, reason)
        self._write({"row": row, "record": record, **({"reason": reason} if reason else {})})

    def _write(self, value: dict[str, Any]) -> None:
        with writing_alone(self._partial):
            self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def finish(self) -> tuple[int, str]:
        """Make the final file, whole or not at all; returns its rows, and what was left out in words.

        Raises `TrainingError` if nothing is left to write.
        """
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(self._left_out.items()))
        records = [record for _, record in sorted(self._records.items()) if record is not None]
        if not records:
            raise TrainingError(f"no answer is left to write; left out: {left_out}; {self._partial} has them all")
        with writing_alone(self._path), replacing(self._path) as partial, partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._file.close()
        self._partial.unlink()
        return len(records), left_out

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        with writing_alone(self._partial):  # closing tries what could not be written once more
            self._file.close()
