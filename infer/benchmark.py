"""`benchmark`: speed and exactness against plain decoding, all arms in one process, prompt by prompt."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import InputError
from infer.options import ACCEPTANCES, ModelOptions, add_model_flags, add_prompt_flags, positives, seed
from infer.prompts import Prompts, find_prompts
from infer.source import local_folder
from infer.speculation import LOOKUPS, Tuned, add_drafting_flags, tree
from infer.terminal import Terminal

ARMS = ("plain", "loop", "chain", "early-exit", "tree", "hybrid", "lookup", "branch", "block", "coupled")
_DEFAULT_ARMS = ARMS[:4]
_SAMPLED_ARMS = ("block", "coupled")


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to compare, on what."""

    exit_layers: tuple[int, ...] | None = None  # to choose from; None: the checkpoint's
    num_draft_tokens: tuple[int, ...] | None = None  # to choose from; None: the checkpoint's, else 4
    arms: tuple[str, ...] = _DEFAULT_ARMS  # of ARMS; the first is the baseline
    trees: tuple[str | tuple[int, ...], ...] = ()  # shapes to choose from; none: the checkpoint's, else a default one
    draft_stop: float | str = "tuned"  # of chains
    draft_vocabulary: bool | Tuned = "tuned"
    batch_sizes: tuple[int, ...] | None = None  # compare batches of these sizes instead
    equal_budget: bool = False  # compare chains and trees of which as many tokens are verified instead
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
        if self.equal_budget:
            return False
        sizes = [len(self.exit_layers or (0,)) * len(self.num_draft_tokens or (0,))]
        if "tree" in self.arms:
            sizes.append(len(self.exit_layers or (0,)) * len(self.trees or (0,)))
        return max(sizes) > 1

    @property
    def needs_exit(self) -> bool:
        """Whether any arm drafts by early exit."""
        return self.equal_budget or bool(set(self.arms) - {"plain", "loop", "lookup"})

    def __post_init__(self) -> None:
        """Raise `InputError` where flags contradict each other."""
        idle = [arm for arm in self.arms if arm in _SAMPLED_ARMS]
        if idle and not self.sampled:
            raise InputError(f"arm {idle[0]} is a way to sample: add --sampled")
        if self.equal_budget and self.batch_sizes:
            raise InputError("--equal-budget and --batch-sizes are two comparisons: give one")


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
    _add_arms(add)
    add("--sampled", action="store_true", help="measure sampling (temperature 0.8, top-p 0.95) beside greedy")
    add(
        "--check",
        action="store_true",
        help="only check that greedy outputs are equal in float32; exit code 1 if not",
    )
    add_drafting_flags(parser.add_argument_group("drafting"))
    _add_lengths(parser)


def _add_arms(add: Any) -> None:
    add(
        "--arms",
        type=arms,
        metavar="NAME,...",
        help=f"what to compare with plain decoding, of {', '.join(ARMS[1:])} "
        f"(default: {','.join(_DEFAULT_ARMS[1:])}, and what --tree, --lookup and --acceptance name)",
    )
    add(
        "--tree",
        dest="trees",
        type=tree,
        action="append",
        metavar="SHAPE",
        help="shape of the arm tree, s3_k2_d6 or 3,2,1; given again: to choose from",
    )
    add("--lookup", choices=LOOKUPS, default="off", help="add the arm of this prompt lookup")
    add("--acceptance", choices=ACCEPTANCES, default=ACCEPTANCES[0], help="add the arm of this rule; needs --sampled")
    add(
        "--batch-sizes",
        type=positives,
        metavar="B,...",
        help="instead compare batches of so many unequal prompts, and say from which size on drafting does not pay",
    )
    add(
        "--equal-budget",
        action="store_true",
        help="instead compare chains of --num-draft-tokens with trees of which as many tokens are verified",
    )


def arms(text: str) -> tuple[str, ...]:
    """Names of ARMS between commas, each once; plain comes first in any case."""
    names = dict.fromkeys(["plain", *text.split(",")])
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no arm: choose of {', '.join(ARMS)}")
    return tuple(names)


def _arms_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Those that are named, and those that another flag asks for."""
    lookup = {"off": None, "only": "lookup"}.get(arguments.lookup, arguments.lookup)
    rule = arguments.acceptance if arguments.acceptance in _SAMPLED_ARMS else None
    named = arguments.arms or _DEFAULT_ARMS
    implied = ["tree" if arguments.trees and not arguments.equal_budget else None, lookup, rule]
    return tuple(dict.fromkeys([*named, *(name for name in implied if name is not None)]))


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    defaults = BenchmarkOptions
    counts = {
        "--num-prompts": (
            defaults.num_prompts,
            "prompts to report, and at most as many to choose settings with",
        ),
        "--prompt-tokens": (defaults.prompt_tokens, "longer prompts are cut"),
        "--max-new-tokens": (defaults.max_new_tokens, "an output ends earlier at the end-of-sequence token"),
        "--repeats": (defaults.repeats, "times that everything is run"),
    }
    add = add_prompt_flags(parser, counts)
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
        InputError: if flags contradict each other, or the record could not be written in the end.
    """
    names = BenchmarkOptions.__dataclass_fields__
    given = {name: getattr(arguments, name) for name in names}
    options = BenchmarkOptions(**given | {"arms": _arms_of(arguments), "trees": tuple(arguments.trees or ())})
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json {options.json}: there is no folder {options.json.parent}: make it first")
    return options


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, compare; returns the exit code."""
    options = read_options(arguments)
    model = ModelOptions.read(arguments)
    folder = local_folder(model.model)
    prompts: Prompts = find_prompts(arguments.prompts, folder, options.has_choice and not arguments.check)
    idle = [f for f in ("batch_sizes", "equal_budget", "sampled") if getattr(arguments, f)]
    if arguments.check and idle:
        flag = idle[0].replace("_", "-")
        raise InputError(
            f"--check compares greedy outputs, one prompt at a time, and --{flag} does not: give one of them"
        )
    if arguments.check and model.dtype not in ("auto", "float32"):
        raise InputError(f"--check compares in float32, but --dtype is {model.dtype}: leave it out")

    # Here, so that wrong flags are told before seconds of imports.
    from infer.batch_benchmark import compare_batches
    from infer.budget import compare_budgets
    from infer.comparison import check, compare

    if arguments.check:
        return check(model, options, prompts, Terminal())
    comparison = compare_batches if options.batch_sizes else compare_budgets if options.equal_budget else compare
    return comparison(model, options, prompts, Terminal())
