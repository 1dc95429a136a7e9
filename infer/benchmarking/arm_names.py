"""The names of the arms that a benchmark compares, and the flags that choose among them. Nothing here imports torch."""

import argparse
from collections.abc import Sequence
from typing import Any

from infer.errors import InputError
from infer.options import ACCEPTANCES, positives
from infer.speculation import LOOKUPS, tree

ARMS = (
    *("plain", "compiled", "loop", "chain", "early-exit", "tree", "hybrid", "lookup", "transformers-lookup"),
    *("branch", "assistant", "auto", "block", "coupled"),
)
DEFAULT_ARMS = ("plain", "loop", "chain", "early-exit")
SAMPLED_ARMS = ("block", "coupled")
_WITHOUT_EXIT = {"plain", "compiled", "loop", "lookup", "transformers-lookup", "assistant", "auto"}


def add_arm_flags(add: Any) -> None:
    """--arms, the flags that imply an arm, --batch-sizes and --equal-budget."""
    add(
        "--arms",
        type=arms,
        metavar="NAME,...",
        help=f"what to compare with plain decoding, of {', '.join(ARMS[1:])} "
        f"(default: {','.join(DEFAULT_ARMS[1:])}, and what --tree, --lookup, --acceptance and --assistant name)",
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
        "--assistant",
        metavar="MODEL",
        help="add the arm assistant: transformers' drafts by this smaller model, a folder or Hub id",
    )
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


def needs_exit(names: Sequence[str]) -> bool:
    """Whether any of the arms drafts by an early exit that has to be named."""
    return bool(set(names) - _WITHOUT_EXIT)


def arms_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Those that are named, and those that another flag asks for.

    Raises:
        InputError: if flags name arms that would not run.
    """
    lookup = {"off": None, "only": "lookup"}.get(arguments.lookup, arguments.lookup)
    rule = arguments.acceptance if arguments.acceptance in SAMPLED_ARMS else None
    assistant = "assistant" if arguments.assistant is not None else None
    if arguments.equal_budget:
        asked = {"--arms": arguments.arms, "--lookup": lookup, "--acceptance": rule, "--assistant": assistant}
        idle = next((flag for flag, value in asked.items() if value is not None), None)
        if idle:
            raise InputError(f"--equal-budget compares chains with trees and nothing else: leave {idle} out")
    if assistant is None and "assistant" in (arguments.arms or ()):
        raise InputError("arm assistant drafts with a second model: name it, --assistant MODEL")
    named = arguments.arms or DEFAULT_ARMS
    implied = ["tree" if arguments.trees and not arguments.equal_budget else None, lookup, rule, assistant]
    return tuple(dict.fromkeys([*named, *(name for name in implied if name is not None)]))
