"""`load`: latency and throughput of serving, under so many requests at once or so many a second, in one process."""

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.benchmark import BenchmarkOptions
from infer.errors import InputError
from infer.load_arrivals import ClosedLoop, Level, OpenLoop
from infer.load_metrics import Objective
from infer.options import ModelOptions, add_model_flags, add_prompt_flags, positive, positives, seed
from infer.prompts import Prompts, find_prompts
from infer.source import local_folder
from infer.speculation import number
from infer.terminal import Terminal

ARMS = ("plain", "loop", "chain", "tree", "hybrid", "lookup", "branch")
BATCHINGS = ("continuous", "static")
_DEFAULT_ARMS = ("plain", "loop", "chain", "hybrid")
_DEFAULT_CONCURRENCY = (1, 2, 4, 8)
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class LoadOptions:
    """What load, on what."""

    concurrency: tuple[int, ...] = ()  # closed loops: requests in flight
    rate: tuple[float, ...] = ()  # open loops: requests a second
    arms: tuple[str, ...] = _DEFAULT_ARMS  # of ARMS
    batch_size: int = 16  # most rows decoded together
    batching: str = "continuous"  # of this kit's loop, one of BATCHINGS; transformers' is static
    num_requests: int = 32  # of each arm under each level, and repeat
    timeout: float = 120.0  # seconds from arrival after which a request counts as timed out
    slo_ttft: float | None = None  # milliseconds; of the goodput
    slo_tpot: float | None = None  # milliseconds; likewise
    exit_layer: int | None = None  # None: the checkpoint's
    num_draft_tokens: int | None = None  # None: the checkpoint's, else 4
    num_prompts: int = 8  # different ones; requests go round them
    prompt_tokens: int = 64  # longer prompts are cut
    max_new_tokens: int = 64  # tokens; an output ends earlier at the end-of-sequence token
    repeats: int = 1  # times that everything is run
    seed: int = 0  # of the arrivals
    json: Path | None = None  # where to write the record as well
    png: Path | None = None  # where to draw latency against throughput

    @property
    def levels(self) -> tuple[Level, ...]:
        """Closed loops, then open ones."""
        return (*map(ClosedLoop, self.concurrency), *map(OpenLoop, self.rate))

    @property
    def widest(self) -> int:
        """Most requests that are decoded together: an open loop may fill the batch."""
        most = self.num_requests if self.rate else max(self.concurrency)
        return min(self.batch_size, most)

    @property
    def objective(self) -> Objective:
        """What goodput asks for."""
        return Objective(self.slo_ttft, self.slo_tpot)

    def batching_of(self, arm: str) -> str:
        """How the arm of this name makes batches."""
        return "static" if arm == "plain" else self.batching

    def as_benchmark(self) -> BenchmarkOptions:
        """The same arms, settings and prompts, for what `benchmark` shares with this command."""
        return BenchmarkOptions(
            exit_layers=None if self.exit_layer is None else (self.exit_layer,),
            num_draft_tokens=None if self.num_draft_tokens is None else (self.num_draft_tokens,),
            arms=self.arms,
            num_prompts=self.num_prompts,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=self.max_new_tokens,
        )

    def scope(self, prompts: Prompts, num_prompts: int) -> dict[str, Any]:
        """What was run, for the record."""
        names = ("batch_size", "timeout", "slo_ttft", "slo_tpot", "prompt_tokens", "max_new_tokens", "repeats", "seed")
        own = {name: getattr(self, name) for name in names}
        own["max_batch_size"] = own.pop("batch_size")
        return {"prompts": prompts.source, "num_prompts": num_prompts, "num_requests": self.num_requests, **own}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    defaults = LoadOptions
    add_model_flags(parser)
    add = parser.add_argument_group("load").add_argument
    few = ",".join(map(str, _DEFAULT_CONCURRENCY))
    add(
        "--concurrency",
        type=positives,
        metavar="C,...",
        help=f"closed loop: so many requests are always in flight (default, without --rate: {few})",
    )
    add("--rate", type=rates, metavar="R,...", help="open loop: so many requests arrive a second, as a Poisson process")
    add(
        "--arms",
        type=arms,
        default=defaults.arms,
        metavar="NAME,...",
        help=f"ways to decode, of {', '.join(ARMS)} (default: {','.join(_DEFAULT_ARMS)})",
    )
    add(
        "--batch-size", type=positive, default=defaults.batch_size, metavar="B", help="most rows (default: %(default)s)"
    )
    add(
        "--batching",
        choices=BATCHINGS,
        default=defaults.batching,
        help="of this kit's arms: requests join a running batch, or wait until it has ended, as they do for plain",
    )
    add("--timeout", type=above_zero, default=defaults.timeout, metavar="S", help="seconds (default: %(default)s)")
    add("--slo-ttft", type=above_zero, metavar="MS", help="goodput counts requests whose first token took no longer")
    add("--slo-tpot", type=above_zero, metavar="MS", help="goodput counts requests whose time per token was no longer")
    add = parser.add_argument_group("drafting").add_argument
    add("--exit-layer", type=positive, metavar="E", help="layers that draft (default: what the checkpoint carries)")
    add("--num-draft-tokens", type=positive, metavar="K", help="drafted a step (default: what the checkpoint carries)")
    _add_lengths(parser)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    defaults = LoadOptions
    counts = {
        "--num-requests": (defaults.num_requests, "requests of each arm under each load"),
        "--num-prompts": (defaults.num_prompts, "different prompts; requests go round them"),
        "--prompt-tokens": (defaults.prompt_tokens, "longer prompts are cut"),
        "--max-new-tokens": (defaults.max_new_tokens, "an output ends earlier at the end-of-sequence token"),
        "--repeats": (defaults.repeats, "times that everything is run"),
    }
    add = add_prompt_flags(parser, counts)
    add("--seed", type=seed, default=defaults.seed, metavar="N", help="of the arrivals (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the record, which ends standard output, to FILE as well")
    add("--png", type=Path, metavar="FILE", help="draw latency against throughput (.png, .svg, .pdf)")


def rates(text: str) -> list[float]:
    """Numbers above 0 between commas; each once, in order."""
    return sorted({above_zero(part) for part in text.split(",")})


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return float(number(text, float, lambda value: 0 < value < float("inf"), "a number above 0"))


def arms(text: str) -> tuple[str, ...]:
    """Names of ARMS between commas, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no arm: choose of {', '.join(ARMS)}")
    return names


def read_options(arguments: argparse.Namespace) -> LoadOptions:
    """The options from the flags of `add_arguments`.

    Raises:
        InputError: if what is found out could not be written in the end.
    """
    given = {name: getattr(arguments, name) for name in LoadOptions.__dataclass_fields__}
    given["rate"] = tuple(given["rate"] or ())
    given["concurrency"] = tuple(given["concurrency"] or (() if given["rate"] else _DEFAULT_CONCURRENCY))
    options = LoadOptions(**given)
    for flag, path in (("--json", options.json), ("--png", options.png)):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{flag} {path}: there is no folder {path.parent}: make it first")
    if options.png is not None:
        if options.png.suffix.lower() not in _PICTURES:
            raise InputError(f"--png {options.png}: name it with one of {', '.join(_PICTURES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise InputError("--png needs matplotlib, which is not installed: pip install matplotlib")
    return options


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, measure; returns the exit code."""
    options, model = read_options(arguments), ModelOptions.read(arguments)
    prompts = find_prompts(arguments.prompts, local_folder(model.model), need_validation=False)

    from infer.load_run import load_test  # here, so that wrong flags are told before seconds of imports

    return load_test(model, options, prompts, Terminal())
