"""`load`: latency and throughput of serving, under so many requests at once or so many a second, in one process."""

import argparse
from pathlib import Path

from infer.options import ModelOptions, above_zero, add_model_flags, add_prompt_flags, positive, positives, seed
from infer.prompts import find_prompts
from infer.serving.options import ARMS, BATCHINGS, CLOCKS, DEFAULT_ARMS, DEFAULT_CONCURRENCY, LoadOptions
from infer.source import local_folder
from infer.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    defaults = LoadOptions
    add_model_flags(parser)
    add = parser.add_argument_group("load").add_argument
    few = ",".join(map(str, DEFAULT_CONCURRENCY))
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
        help=f"ways to decode, of {', '.join(ARMS)} (default: {','.join(DEFAULT_ARMS)})",
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
    add(
        "--clock",
        choices=CLOCKS,
        default=defaults.clock,
        help="processor: count the time that this process had the core, on a machine that others use as well; needs "
        "--threads 1",
    )
    add("--timeout", type=above_zero, default=defaults.timeout, metavar="S", help="seconds (default: %(default)s)")
    add("--slo-ttft", type=above_zero, metavar="MS", help="goodput counts requests whose first token took no longer")
    add("--slo-tpot", type=above_zero, metavar="MS", help="goodput counts requests whose time per token was no longer")
    _add_drafting(parser)
    _add_lengths(parser)


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("drafting").add_argument
    add("--exit-layer", type=positive, metavar="E", help="layers that draft (default: what the checkpoint carries)")
    add("--num-draft-tokens", type=positive, metavar="K", help="drafted a step (default: what the checkpoint carries)")


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


def arms(text: str) -> tuple[str, ...]:
    """Names of ARMS between commas, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no arm: choose of {', '.join(ARMS)}")
    return names


def read_options(arguments: argparse.Namespace) -> LoadOptions:
    """The options from the flags of `add_arguments`."""
    given = {name: getattr(arguments, name) for name in LoadOptions.__dataclass_fields__}
    given["rate"] = tuple(given["rate"] or ())
    given["concurrency"] = tuple(given["concurrency"] or (() if given["rate"] else DEFAULT_CONCURRENCY))
    return LoadOptions(**given)


def run(arguments: argparse.Namespace) -> int:
    """Check the flags, load, measure; returns the exit code."""
    options, model = read_options(arguments), ModelOptions.read(arguments)
    options.check(model)
    folder = local_folder(model.model, [options.exit_layer])
    prompts = find_prompts(arguments.prompts, folder, need_validation=False)

    from infer.serving.run import load_test  # here, so that wrong flags are told before seconds of imports

    return load_test(model, options, prompts, Terminal())
