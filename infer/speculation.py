"""How to draft: the flags of it, checked before anything is loaded. Nothing here imports torch."""

import argparse
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from infer.errors import InputError

Tuned = Literal["tuned"]
Auto = Literal["auto"]
LOOKUPS = ("off", "only", "hybrid", "branch")
STOPS = ("heuristic", "cost")
_DYNAMIC = re.compile(r"s\d+_k\d+_d\d+")


@dataclass(frozen=True)
class SpeculationOptions:
    """What `layerskip.checkpoint.settings.Setting` says in the end; "tuned" is what the checkpoint carries."""

    exit_layer: int | Auto | Tuned | None = "tuned"  # layers that draft; "auto": what pays; None: plain
    num_draft_tokens: int | Auto | Tuned = "tuned"  # most tokens drafted a step by a chain; "auto": as many as pay
    tree: str | tuple[int, ...] | Tuned = "tuned"  # shape of the candidate trees instead of a chain
    lookup: str = "tuned"  # prompt lookup: one of LOOKUPS
    draft_stop: float | str = "tuned"  # when a chain ends earlier: a probability, or one of STOPS
    draft_vocabulary: bool | Tuned = "tuned"  # whether the exit's head is cut to the checkpoint's draft vocabulary

    def __post_init__(self) -> None:
        """Raise `InputError` where a flag contradicts another one, or would do nothing."""
        given = {flag: value for flag, value in self._flags().items() if value != "tuned"}
        exits = [flag for flag in ("--tree", "--draft-stop", "--num-draft-tokens") if flag in given]
        if self.exit_layer is None and (exits or self.lookup in ("hybrid", "branch")):
            idle = exits[0] if exits else f"--lookup {self.lookup}"
            raise InputError(f"{idle} goes with an early exit: leave it out, or --exit-layer none")
        others = [flag for flag in given if flag != "--lookup"]
        if self.lookup == "only" and others:
            raise InputError(
                f"{others[0]} does nothing with --lookup only, where no layer drafts: leave one of the two out"
            )
        auto = next((flag for flag in ("--exit-layer", "--num-draft-tokens") if given.get(flag) == "auto"), None)
        if auto and self.lookup == "branch":
            raise InputError(f"{auto} auto weighs chains, which --lookup branch makes trees of: use --lookup hybrid")
        if auto and self.draft_stop not in ("tuned", "cost"):
            raise InputError(f"{auto} auto ends drafts by itself, and so does --draft-stop: leave one of the two out")
        if given.get("--exit-layer") == "auto" and "--tree" in given:
            raise InputError("--exit-layer auto weighs chains, and --tree grows none: give a number of layers")
        for flag in ("--num-draft-tokens", "--draft-stop"):
            if "--tree" in given and flag in given:
                raise InputError(f"{flag} is of chains, and --tree grows none: leave one of the two out")

    def _flags(self) -> dict[str, Any]:
        names = ("exit_layer", "num_draft_tokens", "tree", "lookup", "draft_stop")
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        return values if self.exit_layer is not None else {**values, "--exit-layer": "tuned"}

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "SpeculationOptions":
        """From the flags of `add_speculation_flags`."""
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})

    def setting(self) -> dict[str, Any]:
        """Of each field of a `Setting` its value, or "tuned"."""
        return asdict(self)


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """--exit-layer, --num-draft-tokens, and those of `add_drafting_flags`."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--exit-layer",
        type=exit_layer,
        default="tuned",
        metavar="E",
        help="layers that draft, 1 .. L-1; auto: in every step what pays best; none: plain decoding (default: what the "
        "checkpoint carries)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=draft_tokens,
        default="tuned",
        metavar="K",
        help="most tokens drafted a step; auto: as many as pay (default: what the checkpoint carries, else 4)",
    )
    group.add_argument(
        "--tree",
        type=tree,
        default="tuned",
        metavar="SHAPE",
        help="draft a tree instead of a chain: s3_k2_d6 (3 deep, 2 branches, 6 tokens verified), or its widths: 3,2,1",
    )
    group.add_argument(
        "--lookup",
        choices=LOOKUPS,
        default="tuned",
        help="draft what followed the last tokens before: only; where nothing is found, by the exit (hybrid); or as "
        "one branch of the exit's tree",
    )
    add_drafting_flags(group)


def add_drafting_flags(group: Any) -> None:
    """--draft-stop, --no-draft-vocabulary."""
    group.add_argument(
        "--draft-stop",
        type=draft_stop,
        default="tuned",
        metavar="P",
        help="end a draft before a token of which the exit is less sure than P, 0 to 1; heuristic: by what the last "
        "rounds accepted; cost: where a token is not worth its time",
    )
    group.add_argument(
        "--no-draft-vocabulary",
        dest="draft_vocabulary",
        action="store_const",
        const=False,
        default="tuned",
        help="draft with the whole head where the checkpoint has a draft vocabulary",
    )


def in_flags(error: ValueError) -> str:
    """The library's message with our flags for its arguments: draft_stop=2 becomes --draft-stop 2. A name that is
    also a word stays one where it has no value: a tree is no chain."""
    names = [*SpeculationOptions.__dataclass_fields__, "acceptance"]
    either = "|".join(names)
    text = str(error).replace("exit_layer=None", "exit_layer='none'")
    text = re.sub(rf"(?<![\w-])({either})='([^']*)'", lambda found: f"{_flag(found[1])} {found[2]}", text)
    text = re.sub(rf"(?<![\w-])({either})=", lambda found: f"{_flag(found[1])} ", text)
    alone = "|".join(name for name in names if "_" in name)
    return re.sub(rf"(?<![\w-])({alone})\b", lambda found: _flag(found[0]), text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def exit_layer(text: str) -> int | Auto | Tuned | None:
    """1 or more; None for "none"; "auto" or "tuned"."""
    words: dict[str, Auto | Tuned | None] = {"none": None, "auto": "auto", "tuned": "tuned"}
    if text in words:
        return words[text]
    return number(text, int, lambda value: value >= 1, "a number of layers, 1 or more, or auto, or none")


def draft_tokens(text: str) -> int | Auto | Tuned:
    """1 or more, "auto" or "tuned"."""
    words: dict[str, Auto | Tuned] = {"auto": "auto", "tuned": "tuned"}
    return words.get(text) or number(text, int, lambda value: value >= 1, "a whole number, 1 or more, or auto")


def tree(text: str) -> str | tuple[int, ...]:
    """A dynamic shape by its name, or the widths of a static one."""
    if text == "tuned" or _DYNAMIC.fullmatch(text):
        return text
    widths = text.split(",")
    if not all(width.isdecimal() and int(width) for width in widths):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write s3_k2_d6 (steps, branches, tokens), or 3,2,1")
    return tuple(map(int, widths))


def draft_stop(text: str) -> float | str:
    """0 to 1, one of STOPS, or "tuned"."""
    if text in (*STOPS, "tuned"):
        return text
    return float(number(text, float, lambda value: 0 <= value <= 1, f"a number from 0 to 1, or {' or '.join(STOPS)}"))


def number(text: str, kind: Any, fits: Any, wanted: str) -> Any:
    """`text` as a number that fits; argparse's error, which names the flag, where it does not."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
