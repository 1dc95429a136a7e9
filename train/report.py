"""A report of a run for a person: report.html in the run folder, made from the files that the run wrote.

python -m train report RUN      makes it again, also of a run that is still going on
"""

import json
from pathlib import Path
from typing import Any

from layerskip.checkpoint.whole_files import write_whole
from train import report_sections as sections
from train.console import Reporter
from train.errors import TrainingError
from train.report_page import page
from train.tracking import read_lines


def write_report(folder: Path) -> Path:
    """Write report.html from what lies in the run folder; returns its path.

    Raises `TrainingError` if the folder holds no metrics, or matplotlib is not installed.
    """
    metrics = read_lines(folder / "metrics.jsonl")
    if not metrics:
        raise TrainingError(f"{folder} holds no metrics.jsonl of a run: give the folder of one that has begun")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TrainingError(
            "the report needs matplotlib, which is not installed: run `pip install matplotlib`"
        ) from None
    evaluation, provenance = _read(folder / "evaluation.json"), _read(folder / "provenance.json")
    settings = folder / "config.yaml"
    name = folder.resolve().name
    parts = [
        sections.summary(name, metrics, evaluation, _read(folder / "config.json")),
        sections.curves(metrics),
        sections.exits_before_and_after(evaluation),
        sections.forecasts(evaluation),
        sections.measured(_read(folder / "benchmark.json")),
        sections.samples(read_lines(folder / "samples.jsonl")),
        sections.origin(provenance, settings.read_text(encoding="utf-8") if settings.is_file() else ""),
    ]
    path = folder / "report.html"
    write_whole(path, page(f"{name}: training report", parts))
    return path


def try_report(folder: Path, reporter: Reporter) -> None:
    """Write the report at the end of a run: the run is whole without it, so a failure is only told."""
    try:
        reporter.say(f"report: {write_report(folder)}")
    except (TrainingError, OSError) as error:
        reporter.say(f"no report: {error}; then: python -m train report {folder}")


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; empty if it is not there (yet)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
