"""Batches of unequal prompts: ours against plain decoding of the left-padded batch, size by size."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from infer.benchmark import BenchmarkOptions
from infer.benchmarking.arms import Arm, Output, plain
from infer.benchmarking.comparison import choose, in_mode
from infer.benchmarking.families import load_families
from infer.benchmarking.measurement import Protocol
from infer.benchmarking.output import modes, name_of, scope, write
from infer.benchmarking.questions import encode
from infer.conditions import conditions, describe
from infer.errors import InputError, first_line
from infer.loading import Loaded
from infer.options import ModelOptions
from infer.prompts import Prompts
from infer.terminal import Advance, Terminal
from layerskip.decode.stats import Statistics
from layerskip.decode.streaming import pad_left

COLUMNS = ("batch", "arm", "exit", "drafts", "plain tokens/s", "tokens/s", "ratio", "accepted", "equal")
_WARM_UP_TOKENS = 8


@dataclass
class Batches:
    """An arm on all batches of one size: outputs[repeat] has one for each prompt; `error` says why there are none."""

    arm: Arm
    outputs: list[list[Output]] = field(default_factory=list)
    seconds: float = 0.0
    statistics: Statistics = field(default_factory=Statistics)
    error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over wall time, prefill included."""
        return sum(len(output.tokens) for outputs in self.outputs for output in outputs) / self.seconds


def compare_batches(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Measure batches of every size; print a table, say from which size on drafting does not pay, then the same as
    one line of JSON. Returns the exit code, 0.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    assert options.batch_sizes is not None
    loaded, families = load_families(model, options)
    families = [family for family in families if family.batches and family.name != "plain"]
    if not families:
        raise InputError("--batch-sizes compares arms that decode batches: name one in --arms, for instance chain")
    greedy = modes(options)["greedy"].generate_arguments()
    chosen, tried = choose(loaded, families, Protocol(encode(loaded, prompts.validation, options), greedy), terminal)
    test = encode(loaded, prompts.test, options)
    rows = [prompt[0].tolist() for prompt in test]
    result: dict[str, Any] = {
        "model": name_of(loaded),
        "conditions": conditions(loaded.model) | scope(options, prompts, test) | {"batch_size": None},
        "validation": tried,
        "batches": {},
    }
    for name, decoding in modes(options).items():
        arms = in_mode(name, chosen, families)
        arguments, records = decoding.generate_arguments(), []
        calls = [1 + options.repeats * num_batches(len(rows), size) for size in options.batch_sizes]
        with terminal.progress(sum(calls) * (1 + len(arms))) as advance:
            for size in options.batch_sizes:
                records += _measure_size(loaded, [plain(), *arms], rows, size, arguments, options, advance)
        result["batches"][name] = records
        _show(result, name, terminal)
    write(result, options, terminal)
    return 0


def num_batches(num_prompts: int, size: int) -> int:
    """All prompts are decoded, some of them twice where they do not fill the last batch."""
    return -(-num_prompts // size)


def make_batches(rows: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """The rows in batches of `size`, begun anew where they run out."""
    filled = list(islice(cycle(rows), num_batches(len(rows), size) * size))
    return [filled[first : first + size] for first in range(0, len(filled), size)]


def pays_until(records: Sequence[dict[str, Any]], arm: str) -> str:
    """From which batch size on an arm is no faster than plain decoding, as a sentence."""
    ratios = [(r["batch_size"], r["ratio"]) for r in records if r["arm"] == arm and r["error"] is None]
    if not ratios:
        return f"{arm}: failed at every batch size"
    paying = [size for size, ratio in ratios if ratio > 1]
    if not paying:
        return f"{arm} pays at no measured batch size, from {ratios[0][0]} on"
    after = [size for size, _ in ratios if size > paying[-1]]
    if not after:
        return f"{arm} pays up to the largest measured batch size, {paying[-1]}"
    return f"{arm} stops paying at batch size {after[0]}: it is faster up to {paying[-1]}, and not from {after[0]} on"


def _measure_size(
    loaded: Loaded,
    arms: Sequence[Arm],
    rows: Sequence[list[int]],
    size: int,
    arguments: dict[str, Any],
    options: BenchmarkOptions,
    advance: Advance,
) -> list[dict[str, Any]]:
    """The records of all arms but the first, plain decoding, at one batch size; arms take turns batch by batch."""
    batches = [_padded(loaded, rows) for rows in make_batches(rows, size)]
    measured = [Batches(arm) for arm in arms]
    warm_up = {**arguments, "max_new_tokens": min(_WARM_UP_TOKENS, options.max_new_tokens)}
    for entry in measured:
        _call(entry, loaded, batches[0], warm_up, options.seed)
        advance(f"batch {size}: {entry.arm.label}")
    for repeat in range(options.repeats):
        for entry in measured:
            entry.outputs.append([])
        for number, batch in enumerate(batches):
            seed = options.seed + repeat * len(batches) + number
            first = (repeat + number) % len(measured)
            for entry in [*measured[first:], *measured[:first]]:
                outputs = _call(entry, loaded, batch, arguments, seed)
                if outputs:
                    entry.outputs[-1] += outputs
                    entry.seconds += outputs[0].seconds
                    if outputs[0].statistics is not None:
                        entry.statistics.merge(outputs[0].statistics)
                advance(f"batch {size}: {entry.arm.label}")
    if measured[0].error is not None:
        raise InputError(f"plain decoding fails on batches of {size} of {loaded.name}: {measured[0].error}")
    return [_record(entry, measured[0], size, greedy=not arguments["do_sample"]) for entry in measured[1:]]


def _padded(loaded: Loaded, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    ids, mask = pad_left(rows, loaded.padding)
    return ids.to(loaded.model.device), mask.to(loaded.model.device)


def _call(
    entry: Batches, loaded: Loaded, batch: tuple[Tensor, Tensor], arguments: dict[str, Any], seed: int
) -> list[Output]:
    if entry.error is not None:
        return []
    torch.manual_seed(seed)
    try:
        return entry.arm.run_batch(loaded.model, batch[0], {**arguments, "attention_mask": batch[1]})
    except Exception as error:  # some architectures refuse batches: that is a result
        entry.error = f"{type(error).__name__}: {first_line(error)}"
        return []


def _record(entry: Batches, baseline: Batches, size: int, greedy: bool) -> dict[str, Any]:
    setting = entry.arm.setting
    result: dict[str, Any] = {
        "batch_size": size,
        "arm": entry.arm.name,
        "exit_layer": setting.exit_layer if setting else None,
        "drafts": entry.arm.drafts if setting else None,
        "error": entry.error,
    }
    if entry.error is not None:
        return result
    result |= {
        "plain_tokens_per_second": round(baseline.tokens_per_second, 3),
        "tokens_per_second": round(entry.tokens_per_second, 3),
        "ratio": round(entry.tokens_per_second / baseline.tokens_per_second, 4),
        "mean_acceptance_length": round(entry.statistics.mean_acceptance_length, 4),
    }
    if greedy:
        pairs = list(zip(baseline.outputs[0], entry.outputs[0], strict=True))
        equal = sum(expected.tokens == actual.tokens for expected, actual in pairs)
        result |= {"num_outputs": len(pairs), "equal_outputs": equal}
    return result


def _show(result: dict[str, Any], mode: str, terminal: Terminal) -> None:
    found, records = result["conditions"], result["batches"][mode]
    title = (
        f"{result['model']}, {mode}, batches of unequal prompts ({found['prompts']}) of at most "
        f"{found['prompt_tokens']} tokens, {found['max_new_tokens']} new tokens, {found['repeats']} repeats"
    )
    terminal.table(title, COLUMNS, [_row(record) for record in records], describe(found))
    for arm in dict.fromkeys(record["arm"] for record in records if record["drafts"] is not None):
        print(pays_until(records, arm))


def _row(record: dict[str, Any]) -> list[str]:
    exit_layer = "-" if record["exit_layer"] is None else str(record["exit_layer"])
    head = [str(record["batch_size"]), record["arm"], exit_layer, record["drafts"] or "-"]
    if record["error"] is not None:
        return [head[0], f"{head[1]}: failed, {record['error']}", *head[2:], *["-"] * (len(COLUMNS) - 4)]
    return [
        *head,
        f"{record['plain_tokens_per_second']:.1f}",
        f"{record['tokens_per_second']:.1f}",
        f"{record['ratio']:.2f}",
        f"{record['mean_acceptance_length']:.2f}",
        f"{record['equal_outputs']}/{record['num_outputs']}" if "equal_outputs" in record else "-",
    ]
