"""Writing to a disk that may be full: what fails on one process fails on all, leaves nothing behind, and is said."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from train.errors import LocalError, TrainingError, first_line

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def writing(accelerator: "Accelerator", partial: Path, alone: bool = False) -> Iterator[None]:
    """Where `partial` is written, by all processes or some: it fails on all of them or on none, and all wait here.

    Raises `TrainingError`, with `partial` removed. Where the writing itself makes the processes wait for each other
    (`alone`), only the one that failed can leave: it raises `LocalError`, and the launcher ends the others.
    """
    import torch  # here: those who write alone need none of it

    reason = ""
    try:
        yield
    except Exception as error:
        if not _is_about_writing(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        reason = why_not_written(partial, error, _AS_CHECKPOINTS)
        if alone:
            raise LocalError(reason) from None
    failed = accelerator.reduce(torch.tensor(float(bool(reason)), device=accelerator.device), reduction="sum")
    if failed > 0:
        raise TrainingError(reason or f"another process could not write {partial}") from None


@contextmanager
def writing_alone(path: Path) -> Iterator[None]:
    """Where this process alone writes `path`, which may be cut off without harm, or is written aside.

    Raises `LocalError` if it cannot: other processes, if there are any, cannot know.
    """
    try:
        yield
    except Exception as error:
        if not _is_about_writing(error):
            raise
        raise LocalError(why_not_written(path, error)) from None


def _is_about_writing(error: Exception) -> bool:
    """torch.save says it by a RuntimeError, tokenizers by an error of no kind, which have one of these in them."""
    if isinstance(error, RuntimeError):
        return any(mark in str(error) for mark in ("inline_container", "StreamWriter", "iostream"))
    return isinstance(error, OSError | SafetensorError) or (type(error) is Exception and "(os error " in str(error))


_AS_CHECKPOINTS = "; the checkpoints before it are whole: make room, and the same command goes on from the last one"


def why_not_written(path: Path, error: Exception, way_out: str = ": make room, and the same command goes on") -> str:
    """The message for a file or folder that could not be written: what, why, and what to do."""
    place = next(folder for folder in path.parents if folder.is_dir())
    free = shutil.disk_usage(place).free / 1e9
    return f"cannot write {path} ({first_line(error)}; {free:.1f} GB are free there){way_out}"


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
