"""The load test itself: every arm under every level, arms in turn, in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from time import perf_counter, process_time
from typing import Any

from infer.benchmark import BenchmarkOptions
from infer.benchmarking.arms import Arm, plain
from infer.benchmarking.families import load_families
from infer.benchmarking.output import name_of
from infer.benchmarking.questions import encode
from infer.conditions import conditions
from infer.errors import InputError
from infer.files import write_record
from infer.loading import Loaded
from infer.options import DecodingOptions, ModelOptions
from infer.prompts import Prompts
from infer.serving.arrivals import ClosedLoop, Level, Prompt, SkippingClock
from infer.serving.engines import LoopEngine, PlainEngine
from infer.serving.level import Outcome, run_level
from infer.serving.metrics import summarize
from infer.serving.options import LoadOptions
from infer.serving.report import draw, record, show
from infer.serving.request_queue import Request
from infer.serving.worker import Engine
from infer.speculation import in_flags
from infer.terminal import Advance, Terminal
from layerskip.checkpoint.settings import Setting

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Served:
    """An arm and what makes its engine, given `max_new_tokens`."""

    arm: Arm
    engine: Callable[[int], Engine]


def load_test(model: ModelOptions, options: LoadOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Measure, print tables and where drafting pays, then the same as one line of JSON. Returns the exit code: 0, or
    130 if Ctrl-C ended it early.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    common = options.as_benchmark()
    loaded, families = load_families(model, common)
    if options.clock == "processor" and loaded.model.device.type != "cpu":
        raise InputError(f"--clock processor does not see the time of {loaded.model.device}: add --device cpu")
    arms = [_served(loaded, family.name, family.arms[0], options) for family in families]
    texts = [tuple(ids[0].tolist()) for ids in encode(loaded, prompts.test, common)]
    requests = list(islice(cycle(texts), options.num_requests))
    steps = len(set(requests)) + len(arms) * options.widest
    total = steps + len(arms) * len(options.levels) * options.num_requests * options.repeats
    with terminal.progress(total) as advance:
        references = _references(loaded, list(dict.fromkeys(requests)), common, advance)
        _warm_up(arms, requests, options, advance)
        outcomes = _measure(arms, requests, options, advance)
    records = [
        record(served.arm, level, options.batching_of(served.arm.name))
        | {"num_requests": options.num_requests * options.repeats, "interrupted": outcome.interrupted}
        | summarize(outcome.answers, outcome.seconds, options.objective)
        | {"equal_outputs": sum(_equal(request, references) for request in outcome.answers)}
        for (served, level), outcome in outcomes
    ]
    interrupted = any(outcome.interrupted for _, outcome in outcomes)
    result: dict[str, Any] = {
        "model": name_of(loaded),
        "conditions": conditions(loaded.model) | options.scope(prompts, len(set(requests))) | {"batch_size": None},
        "interrupted": interrupted,
        "load": records,
    }
    show(result, terminal)
    if options.png is not None:
        draw(result, options.png)
    write_record(result, options.json)
    return 130 if interrupted else 0


def _served(loaded: Loaded, family: str, arm: Arm, options: LoadOptions) -> Served:
    """The engine's maker, tried once: what the model refuses is told before anything runs."""

    def engine(max_new_tokens: int) -> Engine:
        arguments = DecodingOptions(max_new_tokens=max_new_tokens).generate_arguments()
        if family == "plain":
            return PlainEngine(loaded.model, arguments)
        setting = arm.setting or Setting(None, 0)
        return LoopEngine(loaded.model, setting, arguments, options.batching == "continuous")

    try:
        engine(options.max_new_tokens)
    except ValueError as error:
        raise InputError(f"{arm.label} cannot be served: {in_flags(error)}") from None
    return Served(arm, engine)


def _references(
    loaded: Loaded, prompts: Sequence[Prompt], common: BenchmarkOptions, advance: Advance
) -> dict[Prompt, list[int]]:
    """What transformers' greedy decoding says to each prompt alone."""
    import torch

    arguments, found = DecodingOptions(max_new_tokens=common.max_new_tokens).generate_arguments(), {}
    for prompt in prompts:
        found[prompt] = plain().run(loaded.model, torch.tensor([prompt], device=loaded.model.device), arguments).tokens
        advance("references")
    return found


def _warm_up(arms: Sequence[Served], requests: Sequence[Prompt], options: LoadOptions, advance: Advance) -> None:
    """A few short requests for each arm, as many at once as will ever be; not counted."""
    few = list(islice(cycle(requests), options.widest))
    for served in arms:
        outcome = run_level(
            served.engine(min(_WARM_UP_TOKENS, options.max_new_tokens)),
            ClosedLoop(options.widest),
            few,
            batch_size=options.batch_size,
            timeout=float("inf"),
            on_answer=lambda _: advance("warm-up"),
        )
        if outcome.interrupted:
            raise KeyboardInterrupt


def _measure(
    arms: Sequence[Served], requests: Sequence[Prompt], options: LoadOptions, advance: Advance
) -> list[tuple[tuple[Served, Level], Outcome]]:
    """Outcomes by arm and level, in the order of the table. Who goes first changes, and after Ctrl-C nobody goes on."""
    outcomes: dict[tuple[Served, Level], Outcome] = {}
    cells = [(served, level) for level in options.levels for served in arms]
    for repeat in range(options.repeats):
        for number, level in enumerate(options.levels):
            first = (repeat + number) % len(arms)
            for served in [*arms[first:], *arms[:first]]:
                label = f"{served.arm.label}, {level.label}"
                outcome = run_level(
                    served.engine(options.max_new_tokens),
                    level,
                    requests,
                    batch_size=options.batch_size,
                    timeout=options.timeout,
                    seed=options.seed + repeat,
                    clock=SkippingClock(process_time) if options.clock == "processor" else perf_counter,
                    on_answer=partial(_tell, advance, label),
                )
                outcomes.setdefault((served, level), Outcome()).merge(outcome)
                if outcome.interrupted:
                    return [(cell, outcomes[cell]) for cell in cells if cell in outcomes]
    return [(cell, outcomes[cell]) for cell in cells]


def _tell(advance: Advance, label: str, _: Request) -> None:
    advance(label)


def _equal(request: Request, references: dict[Prompt, list[int]]) -> bool:
    return request.error is None and request.tokens == references[request.prompt]
