"""Metrics of a run: one JSON object a line in metrics.jsonl, samples in samples.jsonl, and the same to the trackers."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from layerskip.checkpoint.whole_files import write_whole
from train.config import TrainConfig
from train.disk import why_not_written, writing_alone
from train.errors import LocalError
from train.interrupts import ask_to_stop
from train.trackers import Sink, start_trackers


class Tracker:
    """Writes metrics on the first process, nothing on the others. Leaving it finishes the trackers' runs.

    Where the disk is full, what was trained is worth more than what was measured: the run is asked to stop, which
    saves a checkpoint, and is told of the disk in the end.

    Attributes:
        validations: the validation records of the run so far, those of earlier launches among them.
        notes: what a person should be told about where the metrics go.
    """

    def __init__(self, config: TrainConfig, resumed_step: int, enabled: bool = True) -> None:
        """Open the files after step `resumed_step`; lines of later steps, since lost, are dropped.

        Raises `LocalError` if they cannot be written.
        """
        self.validations: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._sinks: list[Sink] = []
        self._samples: list[dict[str, Any]] = []
        self._metrics_file: TextIO | None = None
        self._samples_file: TextIO | None = None
        self._failure = ""  # why something could not be written
        if not enabled:
            return
        metrics, samples = (config.run.folder / name for name in ("metrics.jsonl", "samples.jsonl"))
        for path in (metrics, samples):
            with writing_alone(path):
                truncate_after(path, resumed_step)
        self.validations = [record for record in read_lines(metrics) if record.get("kind") == "validation"]
        self._samples = read_lines(samples)
        self._metrics_file = metrics.open("a", encoding="utf-8", newline="\n")
        self._samples_file = samples.open("a", encoding="utf-8", newline="\n") if config.tracking.samples else None
        self._sinks = start_trackers(config, resumed_step)
        self.notes = [note for sink in self._sinks if (note := sink.note)]

    def log(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Record `values` (numbers, or dictionaries of them) measured after optimizer step `step`."""
        if self._metrics_file is None:
            return
        record = {"step": step, "kind": kind, **values}
        self._write_line(self._metrics_file, record)
        if kind == "validation":
            self.validations.append(record)
        for sink in self._sinks:
            sink.log(step, flatten(values, kind))

    def log_samples(self, step: int, records: list[dict[str, str]]) -> None:
        """Record texts of the model as it is after step `step`: {"prompt", "continuation"} each."""
        if self._samples_file is None:
            return
        for record in records:
            self._samples.append({"step": step, **record})
            self._write_line(self._samples_file, self._samples[-1])
        for sink in self._sinks:
            sink.show(step, self._samples)

    def close(self) -> None:
        """Close the files and finish the trackers' runs. Raises `LocalError` if something could not be written."""
        for file in (self._metrics_file, self._samples_file):
            if file is not None:
                try:
                    file.close()  # which tries what is left once more
                except OSError as error:
                    self._note_failure(file, error)
        for sink in self._sinks:
            sink.close()
        if self._failure:
            raise LocalError(self._failure)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            self.close()
        except LocalError:
            if kind is None:  # else what failed first is told
                raise

    def _write_line(self, file: TextIO, record: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
        except OSError as error:
            self._note_failure(file, error)
            ask_to_stop()

    def _note_failure(self, file: TextIO, error: OSError) -> None:
        self._failure = self._failure or why_not_written(Path(file.name), error)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none if there is no file. A half-written line is left out."""
    found = []
    for line in _lines(path):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def truncate_after(path: Path, step: int) -> None:
    """Drop the records of steps beyond `step`, and a half-written last line; nothing if there is no file."""
    if not path.is_file():
        return
    kept = []
    for line in _lines(path):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError):
            continue
    write_whole(path, "".join(kept))


def flatten(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """{"loss": 1, "exits": {"2": 3}} under prefix "train" as {"train/loss": 1, "train/exits/2": 3}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        flat.update(flatten(value, name) if isinstance(value, dict) else {name: value})
    return flat


def _lines(path: Path) -> list[str]:
    """The lines of a file, each with its end; `splitlines` would also cut texts at rarer line ends within them."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="\n") as file:
        return list(file)
