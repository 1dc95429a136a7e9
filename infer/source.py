"""Where a model is said to be, checked before anything heavy is imported."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.errors import InputError
from layerskip.model.exit_number import check_exit_layer

RUNS = "runs"  # where training writes; nobody of that name is on the Hub
# What a config.json calls its number of layers: transformers knows them all as num_hidden_layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def local_folder(name: str, exit_layers: Sequence[Any] | None = None) -> Path | None:
    """The folder `name` names, or None if it can only be a Hub id.

    Args:
        exit_layers: those asked for; what is no number (None, "auto", "tuned") is passed over.

    Raises:
        InputError: if it is a path that holds no model, or that does not exist; if the model has too few layers for an
            exit that is asked for, where its config.json says how many it has.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} holds no config.json{_what_it_holds(path)}: give the folder of a saved model")
        if exit_layers and (num_layers := _num_layers(path)) is not None:  # else told by `infer.loading`
            check_exits(exit_layers, num_layers)
        return path
    if path.exists():
        raise InputError(f"{name} is a file: give the folder of a saved model, or a Hub id")
    looks_like_path = name.startswith((".", "~", "/", f"{RUNS}/")) or "\\" in name or name.count("/") > 1
    if looks_like_path or (path.parent != Path() and path.parent.is_dir()):
        raise InputError(f"{name} does not exist: give the folder of a saved model, or a Hub id such as gpt2")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"{name!r} is neither a folder nor a Hub id: give a folder, or an id such as gpt2")
    return None


def _what_it_holds(folder: Path) -> str:
    """For a run that is not finished: where its newest checkpoint is."""
    checkpoints = sorted(folder.glob("checkpoints/step-*/config.json"))
    return f" (its training is not finished; {checkpoints[-1].parent} is its last checkpoint)" if checkpoints else ""


def check_exits(exit_layers: Sequence[Any], num_layers: int) -> None:
    """Raise `InputError` unless a model of so many layers has these exits; what is no number is passed over."""
    try:
        for exit_layer in exit_layers:
            if isinstance(exit_layer, int):
                check_exit_layer(exit_layer, num_layers)
    except ValueError as error:
        raise InputError(str(error)) from None


def _num_layers(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        return next((int(text[name]) for name in _LAYERS if name in text), None)
    except (OSError, ValueError, TypeError, AttributeError):  # told by transformers
        return None
