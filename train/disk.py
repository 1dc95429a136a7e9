"""Writing to a disk that may be full: what fails on one process fails on all, leaves nothing behind, and is said."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from train.errors import LocalError, TrainingError, first_line


@contextmanager
def writing(accelerator: Accelerator, partial: Path, alone: bool = False) -> Iterator[None]:
    """Where `partial` is written, by all processes or some: it fails on all of them or on none, and all wait here.

    Raises `TrainingError`, with `partial` removed. Where the writing itself makes the processes wait for each other
    (`alone`), only the one that failed can leave: it raises `LocalError`, and the launcher ends the others.
    """
    reason = ""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_about_writing(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        reason = _why_not_written(partial, error)
        if alone:
            raise LocalError(reason) from None
    failed = accelerator.reduce(torch.tensor(float(bool(reason)), device=accelerator.device), reduction="sum")
    if failed > 0:
        raise TrainingError(reason or f"another process could not write {partial}") from None


def _is_about_writing(error: Exception) -> bool:
    """torch.save says it by a RuntimeError, which has one of these in it."""
    marks = ("inline_container", "StreamWriter", "iostream")
    return not isinstance(error, RuntimeError) or any(mark in str(error) for mark in marks)


def _why_not_written(partial: Path, error: Exception) -> str:
    place = next(folder for folder in partial.parents if folder.is_dir())
    free = shutil.disk_usage(place).free / 1e9
    return (
        f"cannot write {partial} ({first_line(error)}; {free:.1f} GB are free there); the checkpoints before it are "
        "whole: make room, and the same command goes on from the last one"
    )


def flush(folder: Path) -> None:
    """Have the disk hold all files below `folder` before they get their final name."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Have the disk hold a folder's list of names. Not every system lets a folder be opened (Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
