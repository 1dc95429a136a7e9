"""`tune`: choose how to draft, from one pass over the model's own text and what the stages cost on this machine."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from infer.errors import InputError
from infer.files import check_picture
from infer.options import (
    DecodingOptions,
    ModelOptions,
    add_model_flags,
    add_prompt_flags,
    not_negative,
    positive,
    positives,
    seed,
    share,
)
from infer.prompts import Prompts, find_prompts
from infer.source import local_folder
from infer.speculation import tree
from infer.terminal import Terminal

MOST_DRAFT_TOKENS = 256  # layerskip.model.tree.MAX_TREE_TOKENS, whose import would take seconds
TREES = ("s2_k2_d3", "s3_k2_d5", "s4_k2_d6", (2, 1), (2, 1, 1))  # those not deeper than chains may be long


@dataclass(frozen=True)
class TuneOptions:
    """What is chosen from, and on what."""

    exit_layers: tuple[int, ...] | None = None  # None: those that were trained, else the first third
    max_draft_tokens: int = 8  # drafts of 1 to so many tokens
    trees: tuple[str | tuple[int, ...], ...] = TREES  # candidate trees beside the chains; empty: none
    num_prompts: int = 24  # prompts to choose with; a quarter as many others confirm the choice
    prompt_tokens: int = 64  # longer prompts are cut
    max_new_tokens: int = 64  # tokens that each prompt is continued with
    temperature: float = 0.0  # of the decoding that is tuned for; 0 is greedy
    top_p: float | None = None  # the same; None: all tokens
    seed: int | None = None  # of the sampling; None: 0
    write: bool = False  # put the choice into the checkpoint
    png: Path | None = None  # where to draw the forecasts

    def __post_init__(self) -> None:
        """Raise `InputError` where flags contradict each other."""
        if self.max_draft_tokens > MOST_DRAFT_TOKENS:
            raise InputError(
                f"--max-draft-tokens {self.max_draft_tokens} is more than {MOST_DRAFT_TOKENS}, the most that is ever "
                "drafted: give fewer"
            )
        if self.max_new_tokens <= self.max_draft_tokens:
            raise InputError(
                f"--max-new-tokens {self.max_new_tokens} holds no whole round of --max-draft-tokens "
                f"{self.max_draft_tokens}: give {self.max_draft_tokens + 1} or more"
            )

    def decoding(self) -> DecodingOptions:
        """How the prompts are continued."""
        seed = self.seed or 0 if self.temperature else self.seed
        return DecodingOptions(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    defaults = TuneOptions
    add_model_flags(parser)
    add = parser.add_argument_group("choice").add_argument
    add(
        *("--exit-layers", "--exit-layer"),
        type=positives,
        metavar="E,...",
        help="layers that draft, to choose from (default: the exits that were trained, else the first third)",
    )
    add(
        "--max-draft-tokens",
        type=positive,
        default=defaults.max_draft_tokens,
        metavar="K",
        help="most tokens drafted a step (default: %(default)s)",
    )
    add(
        "--tree",
        dest="trees",
        type=_tree,
        action="append",
        metavar="SHAPE",
        help="candidate trees to choose from beside chains, s3_k2_d6 or 3,2,1; may be given again; none: chains only "
        f"(default: {' '.join(shape if isinstance(shape, str) else ','.join(map(str, shape)) for shape in TREES)})",
    )
    add("--temperature", type=not_negative, default=defaults.temperature, metavar="T", help="0 is greedy (default)")
    add("--top-p", type=share, metavar="P", help="tune for sampling from the most probable tokens that make up P")
    add("--seed", type=seed, metavar="N", help="of the sampling (default: 0)")
    counts = {
        "--num-prompts": (defaults.num_prompts, "prompts to choose with; a quarter as many others confirm the choice"),
        "--prompt-tokens": (defaults.prompt_tokens, "longer prompts are cut"),
        "--max-new-tokens": (defaults.max_new_tokens, "tokens that each prompt is continued with"),
    }
    add_prompt_flags(parser, counts)
    add = parser.add_argument_group("output").add_argument
    add("--write", action="store_true", help="put the choice into MODEL: generate, chat and others then decode with it")
    add("--png", type=Path, metavar="FILE", help="draw the forecasts as a heat map")


def _tree(text: str) -> str | tuple[int, ...] | None:
    """A shape; None for "none"."""
    return None if text == "none" else tree(text)


def read_options(arguments: argparse.Namespace) -> TuneOptions:
    """The options from the flags of `add_arguments`.

    Raises:
        InputError: if flags contradict each other, or the picture could not be drawn in the end.
    """
    given = {name: getattr(arguments, name) for name in TuneOptions.__dataclass_fields__}
    exits = arguments.exit_layers
    trees = TREES if arguments.trees is None else tuple(dict.fromkeys(shape for shape in arguments.trees if shape))
    if arguments.trees is not None and None in arguments.trees and trees:
        raise InputError("--tree none leaves trees out, and another --tree names one: give one of them")
    options = TuneOptions(**given | {"exit_layers": tuple(exits) if exits else None, "trees": trees})
    options.decoding()  # contradictions of the sampling
    check_picture("--png", options.png)
    return options


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, choose; returns the exit code."""
    options = read_options(arguments)
    model = ModelOptions.read(arguments)
    folder = local_folder(model.model, options.exit_layers)
    if options.write and folder is None:
        raise InputError(
            f"--write needs a folder, and {model.model} is on the Hub: download it (hf download {model.model} "
            "--local-dir FOLDER) and give FOLDER"
        )
    if options.write and folder is not None and not os.access(folder, os.W_OK):
        raise InputError(f"--write cannot write into {folder}: copy it to a folder of yours, or leave --write out")
    prompts: Prompts = find_prompts(arguments.prompts, folder, need_validation=True)
    for line in prompts.notes(options.num_prompts):
        Terminal().note(line)

    from infer.tuning.run import tune  # here, so that wrong flags are told before seconds of imports

    return tune(model, options, prompts, folder, Terminal())
