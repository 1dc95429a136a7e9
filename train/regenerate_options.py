"""`python -m train regenerate`: what may be set on its command line. Nothing here imports torch."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from train.errors import check


@dataclass(frozen=True)
class RegenerateOptions:
    """What is written, and how. Fields are the command's options, with `-` for `_`."""

    output: Path  # the .jsonl to write; {"messages", "group"} or {"text", "prompt", "completion", "group"} a line
    max_new_tokens: int = 256  # tokens of an answer, at most
    prompt_tokens: int = 64  # tokens at the beginning of a text that are given; of a short one, half
    batch_size: int = 16  # rows that are written at the same time
    temperature: float = 0.0  # 0 is greedy; above it, sampled at this temperature
    top_p: float = 1.0  # sample only among the most probable tokens that make up this share
    top_k: int = 0  # sample only among this many tokens; 0: all
    part: str = "0/1"  # K/N: only every N-th row, from the K-th: N processes share the work, each with its own output
    keep_unfinished: bool = False  # keep answers that reach max_new_tokens; texts are kept in any case

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prompt_tokens", "batch_size"):
            check(getattr(self, name) >= 1, f"{flag(name)} is {getattr(self, name)}; it must be at least 1")
        finite = 0 <= self.temperature < float("inf")
        check(finite, f"--temperature is {self.temperature}; it must be at least 0 (greedy) and finite")
        check(0 < self.top_p <= 1, f"--top-p is {self.top_p}; it must be above 0 and at most 1")
        check(self.top_k >= 0, f"--top-k is {self.top_k}; it must be at least 0 (all)")
        numbers = self.part.split("/")
        right = len(numbers) == 2 and all(n.isdecimal() for n in numbers) and int(numbers[0]) < int(numbers[1])
        check(right, f"--part is {self.part!r}; write K/N with K from 0 to N-1, for instance 0/2")
        check(
            self.output.suffix == ".jsonl", f"--output is {self.output}; it must end in .jsonl, which data.path reads"
        )


_DESCRIPTION = "Have the model of CONFIG answer the prompts of its data, and write what data.path reads."


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    """The command's own command line."""
    made = argparse.ArgumentParser(prog="train regenerate", description=_DESCRIPTION)
    made.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        help="a training config: its model (from scratch: the finished run's), data and run.seed",
    )
    made.add_argument("overrides", metavar="section.key=value", nargs="*", help="settings that replace the file's")
    for f in fields(RegenerateOptions):
        if f.name == "output":
            made.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .jsonl to write")
        elif f.type is bool:
            made.add_argument(flag(f.name), action="store_true")
        else:
            made.add_argument(flag(f.name), type=type(f.default), default=f.default, help=f"default: {f.default}")
    return made
