"""The file of answers while it is written: append-only beside the final one, so that a stop loses one line at most.

answers.jsonl.partial    first the settings it was begun with, then {"row", "record", "reason"} a line, in any order
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

    def __init__(self, path: Path, fingerprint: dict[str, Any], keep_unfinished: bool = False) -> None:
        """Go on with `path`.partial, or begin it.

        Args:
            path: of the final file.
            fingerprint: the settings that make an answer what it is.
            keep_unfinished: whether the final file has answers that were cut off; the partial one has them.

        Raises `TrainingError` if answers of other settings than `fingerprint` are there, or if it cannot be written.
        """
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._keep_unfinished = keep_unfinished
        self._rows: dict[int, tuple[dict[str, Any] | None, str]] = {}  # record, and why it is left out
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
        """Take in the whole lines that are there; returns their size in bytes, 0 to begin anew."""
        size, settings = 0, wanted
        with self._partial.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    value = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    value = None
                if value is None:
                    break
                if number == 0:
                    settings = value["settings"]
                else:
                    self._rows[value["row"]] = value["record"], value.get("reason", "")
                size += len(line)
        if settings == wanted:
            return size
        if any(record is not None and not reason for record, reason in self._rows.values()):
            self._refuse(settings, wanted)
        self._rows.clear()  # nothing was finished: other settings throw nothing away
        return 0

    def _refuse(self, there: dict[str, Any], wanted: dict[str, Any]) -> None:
        key = next(key for key in {**there, **wanted} if there.get(key) != wanted.get(key))
        raise TrainingError(
            f"{self._partial} was begun with {key} {there.get(key)!r}, here it is {wanted.get(key)!r}: "
            "go on with the same settings, or delete it"
        )

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def add(self, row: int, record: dict[str, Any] | None, reason: str = "") -> None:
        """Write row number `row`, which is not tried again. With a `reason` it is left out of the final file, but for a
        record where unfinished ones are kept."""
        self._rows[row] = record, reason
        self._write({"row": row, "record": record, **({"reason": reason} if reason else {})})

    def _write(self, value: dict[str, Any]) -> None:
        with writing_alone(self._partial):
            self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            self._file.flush()

    def finish(self) -> tuple[int, str]:
        """Make the final file, whole or not at all; returns its rows, and what was left out in words.

        Raises `TrainingError` if nothing is left to write.
        """
        records, reasons = [], Counter[str]()
        for _, (record, reason) in sorted(self._rows.items()):
            if record is not None and (self._keep_unfinished or not reason):
                records.append(record)
            else:
                reasons[reason] += 1
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
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
