"""Where a model is said to be, checked before anything heavy is imported."""

import re
from pathlib import Path

from infer.errors import InputError

RUNS = "runs"  # where training writes; nobody of that name is on the Hub
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def local_folder(name: str) -> Path | None:
    """The folder `name` names, or None if it can only be a Hub id.

    Raises:
        InputError: if it is a path that holds no model, or that does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} holds no config.json{_what_it_holds(path)}: give the folder of a saved model")
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
