"""A checkpoint that brings its own decoding: `custom_generate/generate.py` beside the weights.

Loaded with `trust_remote_code=True`, transformers puts that file's `generate` in place of `model.generate`, and so do
its pipelines and `transformers serve`. The file is thin: what it calls is here. Without trust, transformers does not
look at the folder, and the checkpoint is an ordinary one.
"""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from layerskip.checkpoint.resolving import resolve_setting
from layerskip.checkpoint.settings import Setting
from layerskip.checkpoint.whole_files import write_whole
from layerskip.decode.generation import prepare, run

FOLDER = "custom_generate"
# Checked by transformers when the checkpoint is loaded, by the distribution's name.
REQUIREMENTS = "layerskip-kit\n"
# The import is inside: transformers would ask for a distribution named as the package is, before it reads the above.
SOURCE = '''"""Decodes this checkpoint by self-speculation: its own early layers draft (pip install layerskip-kit)."""


def generate(*args, model, **kwargs):
    """As `model.generate`, and with the further arguments of `layerskip.generate`."""
    try:
        from layerskip.custom_generate import generate as carried
    except ImportError as error:
        raise ImportError("this checkpoint decodes with LayerSkip: pip install layerskip-kit") from error
    return carried(*args, model=model, **kwargs)
'''

_ARGUMENTS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:-1]  # neither self nor **kwargs
# What only layerskip.generate takes: whoever gives one wants no plain decoding.
_OURS = {field.name for field in fields(Setting)} | {"acceptance", "seed", "generator", "grammar"}


def generate(*args: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
    """As `model.generate(*args, **kwargs)`, by self-speculation at the setting that the checkpoint carries.

    What `layerskip.generate` refuses (beam search, say) is left to transformers, with a warning that gives the reason;
    so is, without one, a checkpoint that was tuned to "off".

    Args:
        model: one whose checkpoint carries `custom_generate`.
        **kwargs: also those of `layerskip.generate`. With one of them given, a refusal is an error.

    Returns:
        What `model.generate` returns.

    Raises:
        ValueError: as transformers does; and where an argument of `layerskip.generate` is out of range.
    """
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    if len(args) > len(_ARGUMENTS) or set(_ARGUMENTS[: len(args)]) & kwargs.keys():
        return GenerationMixin.generate(model, *args, **kwargs)  # which says what is wrong
    given = {name: value for name, value in given.items() if value is not None or name not in _ARGUMENTS}
    ours = sorted(_OURS & given.keys())
    if not ours and ("custom_generate" in given or _drafts_nothing(model)):
        return GenerationMixin.generate(model, **given)
    streamer = given.pop("streamer", None)
    held = None if streamer is None else _Held(streamer)
    try:
        session = prepare(model, **given, streamer=held)
    except ValueError as error:
        if ours:
            raise
        warnings.warn(f"decoded by transformers, without drafts: {error}", stacklevel=2)
        return GenerationMixin.generate(model, **given, streamer=streamer)
    return run(session, held)


def _drafts_nothing(model: PreTrainedModel) -> bool:
    """Whether the checkpoint is tuned to plain decoding; where it is tuned to nothing, `resolve_setting` warns."""
    setting = resolve_setting(model)
    return setting.exit_layer is None and setting.lookup == "off"


class _Held(BaseStreamer):
    """Keeps the prompt back until decoding begins: a call that is refused is begun anew, and puts it again."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._prompt: list[Any] = []
        self.begun = False

    def put(self, value: Any) -> None:
        """The first one is the prompt."""
        if not self._prompt and not self.begun:
            self._prompt.append(value)
            return
        self._begin()
        self._streamer.put(value)

    def end(self) -> None:
        """The text is complete."""
        self._begin()
        self._streamer.end()

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            for value in self._prompt:
                self._streamer.put(value)


def write_custom_generate(folder: str | os.PathLike[str]) -> Path:
    """Have the checkpoint in `folder` carry its decoding; returns the file. Written whole or not at all."""
    path = Path(folder) / FOLDER / "generate.py"
    path.parent.mkdir(exist_ok=True)
    write_whole(path.with_name("requirements.txt"), REQUIREMENTS)
    return write_whole(path, SOURCE)


def remove_custom_generate(folder: str | os.PathLike[str]) -> bool:
    """Take it out again; returns whether it was there.

    Raises:
        ValueError: if what is there is not what `write_custom_generate` wrote.
    """
    path = Path(folder) / FOLDER / "generate.py"
    if not path.is_file():
        return False
    if "layerskip.custom_generate" not in path.read_text(encoding="utf-8"):
        raise ValueError(f"{path} is not ours: remove it by hand")
    shutil.rmtree(path.parent)
    return True
