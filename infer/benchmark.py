"""`benchmark`: speed and exactness against plain decoding, all arms in one process, prompt by prompt."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.benchmarking.arm_names import DEFAULT_ARMS, SAMPLED_ARMS, add_arm_flags, arms_of, needs_exit
from infer.errors import InputError
from infer.files import check_file, check_folder, check_matplotlib
from infer.options import ModelOptions, add_model_flags, add_prompt_flags, positives, seconds, seed
from infer.prompts import Prompts, find_prompts
from infer.source import local_folder
from infer.speculation import Tuned, add_drafting_flags
from infer.terminal import Terminal


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to compare, on what."""

    exit_layers: tuple[int, ...] | None = None  # to choose from; None: the checkpoint's
    num_draft_tokens: tuple[int, ...] | None = None  # to choose from; None: the checkpoint's, else 4
    arms: tuple[str, ...] = DEFAULT_ARMS  # of ARMS; the first is the baseline
    assistant: str | None = None  # model of the arm assistant: local folder or Hub id
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
    timeout: float | None = None  # seconds that a call may take; None: any
    verbose: bool = False  # more tables
    json: Path | None = None  # where to write the record as well
    html: Path | None = None  # where to write a page of it
    answers: Path | None = None  # folder for what the arms answered, in Spec-Bench's format

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
        return self.equal_budget or needs_exit(self.arms)

    def __post_init__(self) -> None:
        """Raise `InputError` where flags contradict each other."""
        idle = [arm for arm in self.arms if arm in SAMPLED_ARMS]
        if idle and not self.sampled:
            raise InputError(f"arm {idle[0]} is a way to sample: add --sampled")
        if self.equal_budget and self.batch_sizes:
            raise InputError("--equal-budget and --batch-sizes are two comparisons: give one")
        if self.timeout is not None and self.batch_sizes:
            raise InputError("--timeout breaks off a call of one prompt, and --batch-sizes has many: leave one out")


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
    add_arm_flags(add)
    add("--sampled", action="store_true", help="measure sampling (temperature 0.8, top-p 0.95) beside greedy")
    add(
        "--check",
        action="store_true",
        help="only check that greedy outputs are equal in float32; exit code 1 if not",
    )
    add_drafting_flags(parser.add_argument_group("drafting"))
    _add_lengths(parser)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    defaults = BenchmarkOptions
    counts = {
        "--num-prompts": (
            defaults.num_prompts,
            "prompts to report, and at most as many to choose settings with",
        ),
        "--prompt-tokens": (defaults.prompt_tokens, "longer texts are cut; conversations are not"),
        "--max-new-tokens": (defaults.max_new_tokens, "an output ends earlier at the end-of-sequence token"),
        "--repeats": (defaults.repeats, "times that everything is run"),
    }
    add = add_prompt_flags(parser, counts)
    add("--seed", type=seed, metavar="N", help=f"of the sampling; needs --sampled (default: {defaults.seed})")
    add("--timeout", type=seconds, metavar="SECONDS", help="break off a call that takes longer (default: never)")
    _add_output(parser.add_argument_group("output").add_argument)


def _add_output(add: Any) -> None:
    add("--verbose", action="store_true", help="show latencies, and what the rounds did, as tables too")
    add("--json", type=Path, metavar="FILE", help="write the record, which ends standard output, to FILE as well")
    add(
        "--answers",
        type=Path,
        metavar="FOLDER",
        help="write what each arm answered to FOLDER/ARM.jsonl, as Spec-Bench's scripts read it",
    )
    add("--html", type=Path, metavar="FILE", help="write a page with tables, plots and the record, all in one file")


def read_options(arguments: argparse.Namespace) -> BenchmarkOptions:
    """The options from the flags of `add_arguments`.

    Raises:
        InputError: if flags contradict each other, or the record could not be written in the end.
    """
    names = BenchmarkOptions.__dataclass_fields__
    given = {name: getattr(arguments, name) for name in names}
    if arguments.seed is not None and not arguments.sampled:
        raise InputError(f"--seed {arguments.seed} does nothing where nothing is sampled: add --sampled")
    given |= {"arms": arms_of(arguments), "trees": tuple(arguments.trees or ()), "seed": arguments.seed or 0}
    options = BenchmarkOptions(**given)
    if options.answers is not None:
        if options.batch_sizes:
            raise InputError(
                "--answers are of prompts decoded one at a time, and --batch-sizes has many: leave one out"
            )
        if options.equal_budget:
            raise InputError("--answers are of the arms of --arms, and --equal-budget has none: leave one out")
        if options.answers.exists() and not options.answers.is_dir():
            raise InputError(f"--answers {options.answers} is a file: name a folder, for a file of each arm")
        check_folder("--answers", options.answers)
    check_file("--json", options.json)
    check_file("--html", options.html)
    if options.html is not None:
        check_matplotlib("--html")
    return options


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, compare; returns the exit code."""
    options = read_options(arguments)
    model = ModelOptions.read(arguments)
    folder = local_folder(model.model, options.exit_layers)
    if options.assistant is not None:
        local_folder(options.assistant)
    prompts: Prompts = find_prompts(arguments.prompts, folder, options.has_choice and not arguments.check)
    idle = [
        f for f in ("batch_sizes", "equal_budget", "sampled", "html", "verbose", "answers") if getattr(arguments, f)
    ]
    for line in prompts.notes(options.num_prompts):
        Terminal().note(line)
    if arguments.check and idle:
        flag = idle[0].replace("_", "-")
        raise InputError(
            f"--check compares greedy outputs, one prompt at a time, and --{flag} does not: give one of them"
        )
    if arguments.check and model.dtype not in ("auto", "float32"):
        raise InputError(f"--check compares in float32, but --dtype is {model.dtype}: leave it out")

    # Here, so that wrong flags are told before seconds of imports.
    from infer.benchmarking.batches import compare_batches
    from infer.benchmarking.budget import compare_budgets
    from infer.benchmarking.comparison import check, compare

    if arguments.check:
        return check(model, options, prompts, Terminal())
    comparison = compare_batches if options.batch_sizes else compare_budgets if options.equal_budget else compare
    return comparison(model, options, prompts, Terminal())
