"""`export`: a checkpoint that brings its own decoding, or its draft as a model of its own."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import InputError
from infer.options import ModelOptions, add_model_flags, positive
from infer.source import local_folder
from infer.terminal import Terminal


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and where."""

    custom_generate: bool = False  # decoding code beside the weights
    assistant_early_exit: bool = False  # transformers' own early exit, in generation_config.json
    remove: bool = False  # take both out again
    output: Path | None = None  # folder of a copy that the three are about; None: the checkpoint itself
    draft: Path | None = None  # folder of the draft
    exit_layer: int | None = None  # of the draft or the early exit; None: what the checkpoint carries

    def __post_init__(self) -> None:
        carrying = {"--custom-generate": self.custom_generate, "--assistant-early-exit": self.assistant_early_exit}
        asked = [flag for flag, given in (carrying | {"--remove": self.remove}).items() if given]
        if not asked and self.draft is None:
            raise InputError("nothing to export: give --custom-generate, --assistant-early-exit or --draft OUT")
        if self.draft is not None and (asked or self.output is not None):
            idle = asked[0] if asked else "--output"
            raise InputError(f"--draft writes a model of its own: leave {idle} out, or run export once for each")
        if self.remove and len(asked) > 1:
            raise InputError(f"--remove takes out what {asked[0]} puts in: leave one of the two out")
        if self.exit_layer is not None and self.draft is None and not self.assistant_early_exit:
            raise InputError(
                f"--exit-layer {self.exit_layer} does nothing with {asked[0]}, which decodes as the checkpoint is tuned"
            )
        for flag, folder in (("--output", self.output), ("--draft", self.draft)):
            if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise InputError(f"{flag} {folder} is there already: give a new folder")

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "ExportOptions":
        """From the flags of `add_arguments`."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_flags(parser)
    add = parser.add_argument_group(
        "a checkpoint that decodes by itself", "MODEL is a folder, which is changed in place unless --output is given"
    ).add_argument
    add(
        "--custom-generate",
        action="store_true",
        help="put custom_generate/generate.py beside the weights: whoever loads the checkpoint with "
        "trust_remote_code=True and has layerskip-kit installed decodes as it is tuned, transformers serve and chat "
        "too; for all others nothing changes",
    )
    add(
        "--assistant-early-exit",
        action="store_true",
        help="write transformers' own early exit into generation_config.json: it drafts for everyone, one sequence at "
        "a time, slower than this kit, and not with every architecture (tried before it is written)",
    )
    add("--remove", action="store_true", help="take out again what these two put in")
    add("--output", type=folder, metavar="OUT", help="write a copy of the checkpoint to OUT, and leave MODEL as it is")
    add = parser.add_argument_group("the draft as a model of its own").add_argument
    add(
        "--draft",
        type=folder,
        metavar="OUT",
        help="write embedding, first E layers, norm and head as an ordinary checkpoint to OUT: a draft model for "
        "transformers (assistant_model), vLLM, SGLang, llama.cpp",
    )
    parser.add_argument_group("both").add_argument(
        "--exit-layer",
        type=positive,
        metavar="E",
        help="layers of the draft or the early exit, 1 .. L-1 (default: what the checkpoint carries)",
    )


def folder(text: str) -> Path:
    """A path, ~ understood."""
    return Path(text).expanduser()


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, write, say what was written; returns the exit code."""
    options, model = ExportOptions.read(arguments), ModelOptions.read(arguments)
    source = local_folder(arguments.model, [options.exit_layer])
    if options.draft is not None:
        from infer.exporting import export_draft  # here, so that wrong flags are told before seconds of imports

        setting = read_setting(source) if source is not None else {}
        return tell(export_draft(model, options, setting, Terminal()))
    if source is None:
        raise InputError(
            f"{arguments.model} is on the Hub: download it (hf download {arguments.model} --local-dir FOLDER) and give "
            "FOLDER"
        )
    if options.output is None and not os.access(source, os.W_OK):
        raise InputError(f"cannot write into {source}: give --output OUT, for a copy")
    setting = {} if options.remove else read_setting(source)
    if options.custom_generate and not setting:
        raise InputError(
            f"{source} carries no setting to decode with: run python -m infer tune {source} --write, and then export"
        )
    if options.assistant_early_exit:
        exit_of(options, setting, str(source))

    from infer.exporting import change

    return tell(change(model, options, setting, source, Terminal()))


def tell(written: dict[str, Any]) -> int:
    """A line of JSON on standard output; returns the exit code, 0."""
    print(json.dumps(written))
    return 0


def read_setting(source: Path) -> dict[str, Any]:
    """What the checkpoint is tuned to, by name; nothing where it is not.

    Raises:
        InputError: if generation_config.json is no JSON.
    """
    path = source / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return dict(stored.get("layerskip") or {})
    except (OSError, ValueError, TypeError, AttributeError):
        raise InputError(f"{path} holds no JSON object: mend it, or copy it anew") from None


def exit_of(options: ExportOptions, setting: dict[str, Any], name: str) -> int:
    """The exit layer asked for, else the tuned one.

    Raises:
        InputError: if there is neither, or the tuned one is "auto".
    """
    exit_layer = options.exit_layer or setting.get("exit_layer")
    if exit_layer == "auto":
        raise InputError(f"{name} is tuned to choose its exit as it goes (auto), and this needs one: give --exit-layer")
    if exit_layer is None:
        why = "is tuned to draft with no layer" if setting else "carries no tuned exit layer"
        raise InputError(f"{name} {why}: give --exit-layer, or choose one with python -m infer tune {name} --write")
    return int(exit_layer)
