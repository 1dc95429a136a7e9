"""The files that flags name: read, checked and written alike by all commands."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from infer.errors import InputError

PICTURES = (".png", ".svg", ".pdf")


def read_text(path: Path, what: str) -> str:
    """The text of a file; `what` it is names it in errors.

    Raises:
        InputError: if it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {what}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): convert it") from None


def check_file(flag: str, path: Path | None) -> None:
    """Raise `InputError` if a flag names a file that could not be written in the end; None is no file."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.parent}: make it first")
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder: name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{flag} {path} cannot be written: name a file where you may write")


def check_folder(flag: str, folder: Path) -> None:
    """Raise `InputError` if nothing could be written into a folder, or into the one that it would be made in."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise InputError(f"{flag} cannot write into {folder}: copy it, or name a folder, where you may write")


def check_picture(flag: str, path: Path | None) -> None:
    """The same of a picture, whose name says of which kind it is."""
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        raise InputError(f"{flag} {path}: name it with one of {', '.join(PICTURES)}")
    check_file(flag, path)
    check_matplotlib(flag)


def check_matplotlib(flag: str) -> None:
    """Raise `InputError` where what a flag asks for cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{flag} needs matplotlib, which is not installed: pip install matplotlib")


def write_record(result: dict[str, Any], file: Path | None) -> None:
    """The record as the last line of standard output, and in a file if asked for."""
    print(json.dumps(result, allow_nan=False), flush=True)  # first: a full disk must not cost the record
    if file is not None:
        try:
            file.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror}; standard output has the record") from None
