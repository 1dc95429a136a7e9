"""Flags that several commands share, and the frozen settings they become. Nothing here imports torch."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from infer.errors import InputError

if TYPE_CHECKING:
    from layerskip.grammar import Grammar

Tuned = Literal["tuned"]
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load, and how."""

    model: str  # local folder or Hub id
    dtype: str = "auto"  # of the weights and the arithmetic; auto: the checkpoint's, where the machine has it
    device: str | None = None  # as torch names it; None: the GPU if there is one
    threads: int | None = None  # CPU threads; None: torch's choice

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "ModelOptions":
        """From the flags of `add_model_flags`."""
        return cls(arguments.model, arguments.dtype, arguments.device, arguments.threads)


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode; greedily at temperature 0."""

    exit_layer: int | Tuned | None = "tuned"  # layers that draft; None: plain; "tuned": the checkpoint's
    num_draft_tokens: int | Tuned = "tuned"  # most tokens drafted a step
    max_new_tokens: int = 256  # tokens
    temperature: float = 0.0  # divides the logits
    top_p: float | None = None  # share of the probability kept; None: all
    top_k: int | None = None  # tokens kept; None: all
    seed: int | None = None  # of the sampling; None: another one each time
    stop: tuple[str, ...] = ()  # strings that end the output
    grammar: "Grammar | None" = None  # what the output must be

    def __post_init__(self) -> None:
        given = {"--top-p": self.top_p, "--top-k": self.top_k}
        idle = next((flag for flag, value in given.items() if value is not None), None)
        if self.temperature == 0 and idle:
            raise InputError(f"{idle} {given[idle]} does nothing at temperature 0 (greedy): add --temperature 1")

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "DecodingOptions":
        """From the flags of `add_decoding_flags`."""
        values = {name: getattr(arguments, name) for name in cls.__dataclass_fields__ if hasattr(arguments, name)}
        return cls(**values | {"stop": tuple(arguments.stop)})

    def generate_arguments(self) -> dict[str, Any]:
        """In the words of `model.generate`; nothing is left to the checkpoint's own sampling defaults."""
        arguments: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            # transformers' names for "all": 1.0 and 0
            top_p = 1.0 if self.top_p is None else self.top_p
            arguments |= {"temperature": self.temperature, "top_p": top_p, "top_k": self.top_k or 0}
        if self.stop:
            arguments["stop_strings"] = list(self.stop)
        if self.grammar is not None:
            arguments |= {"grammar": self.grammar, "eos_token_id": list(self.grammar.eos_token_ids)}
        return arguments


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, --dtype, --device, --threads."""
    parser.add_argument("model", metavar="MODEL", help="local folder or Hub id of a causal language model")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default=ModelOptions.dtype,
        help="auto: the checkpoint's own, but float32 on a CPU without bfloat16 (default)",
    )
    group.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1, mps, ... (default: the GPU if there is one)"
    )
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """--exit-layer, --num-draft-tokens."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--exit-layer",
        type=exit_layer,
        default="tuned",
        metavar="E",
        help="layers that draft, 1 .. L-1; none: plain decoding (default: what the checkpoint carries)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=draft_tokens,
        default="tuned",
        metavar="K",
        help="most tokens drafted a step (default: what the checkpoint carries, else 4)",
    )


def add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    """The speculation flags, and those of `model.generate`."""
    add_speculation_flags(parser)
    defaults = DecodingOptions
    group = parser.add_argument_group("decoding")
    add = group.add_argument
    add(
        "--max-new-tokens",
        type=positive,
        default=defaults.max_new_tokens,
        metavar="N",
        help="default: %(default)s",
    )
    add(
        "--temperature",
        type=not_negative,
        default=defaults.temperature,
        metavar="T",
        help="0 is greedy (default)",
    )
    add(
        "--top-p",
        type=share,
        metavar="P",
        help="sample from the most probable tokens that make up P (default: all)",
    )
    add("--top-k", type=positive, metavar="K", help="sample from the K most probable tokens (default: all)")
    add("--seed", type=seed, metavar="N", help="makes sampling repeatable (default: another output each time)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output at TEXT; may be given again",
    )


def exit_layer(text: str) -> int | Tuned | None:
    """1 or more; None for "none"; or "tuned"."""
    if text in ("none", "tuned"):
        return None if text == "none" else "tuned"
    return _number(text, int, lambda value: value >= 1, "a number of layers, 1 or more, or none")


def draft_tokens(text: str) -> int | Tuned:
    """1 or more, or "tuned"."""
    return "tuned" if text == "tuned" else positive(text)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    return _number(text, int, lambda value: value >= 1, "a whole number, 1 or more")


def positives(text: str) -> list[int]:
    """Whole numbers, 1 or more, between commas; each once, in order."""
    return sorted({positive(part) for part in text.split(",")})


def not_negative(text: str) -> float:
    """A finite number, 0 or more."""
    return _number(text, float, lambda value: 0 <= value < float("inf"), "a number, 0 or more")


def share(text: str) -> float:
    """A number above 0, at most 1."""
    return _number(text, float, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def seed(text: str) -> int:
    """A whole number that torch takes as a seed."""
    return _number(text, int, lambda value: 0 <= value < 2**63, "a whole number, 0 or more")


def _number(text: str, kind: Any, fits: Any, wanted: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value
