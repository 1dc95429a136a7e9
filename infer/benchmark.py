"""`benchmark`: speed and exactness against plain decoding, all arms in one process, prompt by prompt."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from infer.errors import InputError
from infer.options import ModelOptions, add_model_flags, positive, positives, seed
from infer.prompts import Prompts, find_prompts
from infer.source import local_folder
from infer.terminal import Terminal


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to compare, on what."""

    exit_layers: tuple[int, ...] | None = None  # to choose from; None: the checkpoint's
    num_draft_tokens: tuple[int, ...] | None = None  # to choose from; None: the checkpoint's, else 4
    num_prompts: int = 8  # prompts that are reported, and at most as many to choose settings with
    prompt_tokens: int = 64  # longer prompts are cut
    max_new_tokens: int = 128  # tokens; an output ends earlier at the end-of-sequence token
    repeats: int = 3  # times that everything is run
    sampled: bool = False  # measure sampling too, at temperature 0.8, top-p 0.95
    seed: int = 0  # of the sampling
    json: Path | None = None  # where to write the record as well

    @property
    def has_choice(self) -> bool:
        """Whether there are several settings, to be chosen from on prompts of their own."""
        return len(self.exit_layers or (0,)) * len(self.num_draft_tokens or (0,)) > 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add_model_flags(parser)
    add = parser.add_argument_group("comparison").add_argument
    add(
        *("--exit-layers", "--exit-layer"),
        type=positives,
        metavar="E,...",
        help="layers that draft; of several settings the best on the validation prompts is reported on the "
        "test prompts (default: what the checkpoint carries)",
    )
    add(
        "--num-draft-tokens",
        type=positives,
        metavar="K,...",
        help="most tokens drafted a step (default: what the checkpoint carries, else 4)",
    )
    add("--sampled", action="store_true", help="measure sampling (temperature 0.8, top-p 0.95) beside greedy")
    add(
        "--check",
        action="store_true",
        help="only check that greedy outputs are equal in float32; exit code 1 if not",
    )
    _add_lengths(parser)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    defaults = BenchmarkOptions
    add = parser.add_argument_group("prompts and lengths").add_argument
    add(
        "--prompts",
        metavar="FILE",
        help='JSON lines, {"prompt": ...} or {"text": ...} (default: MODEL/prompts/, else built-in ones)',
    )
    counts = {
        "--num-prompts": (
            defaults.num_prompts,
            "prompts to report, and at most as many to choose settings with",
        ),
        "--prompt-tokens": (defaults.prompt_tokens, "longer prompts are cut"),
        "--max-new-tokens": (defaults.max_new_tokens, "an output ends earlier at the end-of-sequence token"),
        "--repeats": (defaults.repeats, "times that everything is run"),
    }
    for flag, (default, help_line) in counts.items():
        add(flag, type=positive, default=default, metavar="N", help=f"{help_line} (default: %(default)s)")
    add("--seed", type=seed, default=defaults.seed, metavar="N", help="of the sampling (default: %(default)s)")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the record, which ends standard output, to FILE as well",
    )


def read_options(arguments: argparse.Namespace) -> BenchmarkOptions:
    """The options from the flags of `add_arguments`.

    Raises:
        InputError: if the record could not be written in the end.
    """
    names = BenchmarkOptions.__dataclass_fields__
    options = BenchmarkOptions(**{name: getattr(arguments, name) for name in names})
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json {options.json}: there is no folder {options.json.parent}: make it first")
    return options


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, compare; returns the exit code."""
    options = read_options(arguments)
    model = ModelOptions.read(arguments)
    folder = local_folder(model.model)
    prompts: Prompts = find_prompts(arguments.prompts, folder, options.has_choice and not arguments.check)
    if arguments.check and model.dtype not in ("auto", "float32"):
        raise InputError(f"--check compares in float32, but --dtype is {model.dtype}: leave it out")

    from infer.comparison import (
        check,
        compare,
    )  # here, so that wrong flags are told before seconds of imports

    return (check if arguments.check else compare)(model, options, prompts, Terminal())
