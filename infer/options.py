"""Flags that several commands share, and the frozen settings they become. Nothing here imports torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infer.errors import InputError
from infer.speculation import SpeculationOptions, add_speculation_flags, number

if TYPE_CHECKING:
    from layerskip.grammar.processor import Grammar

ACCEPTANCES = ("rejection", "block", "coupled")
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

    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    max_new_tokens: int = 256  # tokens
    temperature: float = 0.0  # divides the logits
    top_p: float | None = None  # share of the probability kept; None: all
    top_k: int | None = None  # tokens kept; None: all
    acceptance: str = "rejection"  # which drafted tokens stay when sampling: one of ACCEPTANCES
    seed: int | None = None  # of the sampling; None: another one each time
    stop: tuple[str, ...] = ()  # strings that end the output
    grammar: "Grammar | None" = None  # what the output must be

    def __post_init__(self) -> None:
        acceptance = None if self.acceptance == "rejection" else self.acceptance
        given = {"--top-p": self.top_p, "--top-k": self.top_k, "--acceptance": acceptance, "--seed": self.seed}
        idle = next((flag for flag, value in given.items() if value is not None), None)
        if self.temperature == 0 and idle:
            raise InputError(f"{idle} {given[idle]} does nothing at temperature 0 (greedy): add --temperature 1")
        if self.acceptance == "coupled" and self.seed is None:
            raise InputError("--acceptance coupled gives what plain decoding gives with the same seed: add --seed 0")
        if self.acceptance == "block" and self.speculation.tree != "tuned":
            raise InputError("--acceptance block judges chains, and --tree grows none: leave one of the two out")

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "DecodingOptions":
        """From the flags of `add_decoding_flags`."""
        values = {name: getattr(arguments, name) for name in cls.__dataclass_fields__ if hasattr(arguments, name)}
        return cls(**values | {"stop": tuple(arguments.stop), "speculation": SpeculationOptions.read(arguments)})

    def generate_arguments(self) -> dict[str, Any]:
        """In the words of `model.generate`; nothing is left to the checkpoint's own sampling defaults."""
        arguments: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            # transformers' names for "all": 1.0 and 0
            top_p = 1.0 if self.top_p is None else self.top_p
            arguments |= {"temperature": self.temperature, "top_p": top_p, "top_k": self.top_k or 0}
            if self.acceptance != "rejection":
                arguments["acceptance"] = self.acceptance
            if self.acceptance == "coupled":
                arguments["seed"] = self.seed
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
    group.add_argument("--threads", type=threads, metavar="N", help="CPU threads (default: torch's choice)")


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
    add(
        "--acceptance",
        choices=ACCEPTANCES,
        default=defaults.acceptance,
        help="of drafted tokens when sampling: rejection accepts most, block judges a draft as a whole, coupled gives "
        "what plain decoding gives with the same --seed (default: %(default)s)",
    )
    add("--seed", type=seed, metavar="N", help="makes sampling repeatable (default: another output each time)")
    add(
        "--stop",
        action="append",
        type=not_empty,
        default=[],
        metavar="TEXT",
        help="end the output at TEXT; may be given again",
    )


def add_prompt_flags(parser: argparse.ArgumentParser, counts: Mapping[str, tuple[int, str]]) -> Any:
    """--prompts, and counts by flag (default, what it counts); returns the group's `add_argument`."""
    add = parser.add_argument_group("prompts and lengths").add_argument
    add(
        "--prompts",
        metavar="FILE",
        help='JSON lines: {"prompt": ...} or {"text": ...} to be continued, {"messages": ...} or {"turns": [...]} '
        "(Spec-Bench's questions) to be answered (default: MODEL/prompts/, else built-in ones)",
    )
    for flag, (default, help_line) in counts.items():
        add(flag, type=positive, default=default, metavar="N", help=f"{help_line} (default: %(default)s)")
    return add


def not_empty(text: str) -> str:
    """Any text but the empty one, with which every output ends at once."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty: every output would end at once")
    return text


def threads(text: str) -> int:
    """A whole number from 1 to 1024."""
    return number(text, int, lambda value: 1 <= value <= 1024, "a whole number from 1 to 1024")


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    return number(text, int, lambda value: value >= 1, "a whole number, 1 or more")


def positives(text: str) -> list[int]:
    """Whole numbers, 1 or more, between commas; each once, in order."""
    return sorted({positive(part) for part in text.split(",")})


def not_negative(text: str) -> float:
    """A finite number, 0 or more."""
    return number(text, float, lambda value: 0 <= value < float("inf"), "a number, 0 or more")


def above_zero(text: str, what: str = "a number") -> float:
    """A finite number above 0; `what` it is, for the error."""
    return number(text, float, lambda value: 0 < value < float("inf"), f"{what} above 0")


def seconds(text: str) -> float:
    """A finite number of seconds above 0."""
    return above_zero(text, "a number of seconds")


def share(text: str) -> float:
    """A number above 0, at most 1."""
    return number(text, float, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def seed(text: str) -> int:
    """A whole number that torch takes as a seed."""
    return number(text, int, lambda value: 0 <= value < 2**63, "a whole number, 0 or more")
