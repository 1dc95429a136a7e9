"""The benchmark itself: choose each family's setting on validation prompts, report on test prompts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer import report
from infer.arms import Arm, plain
from infer.benchmark import BenchmarkOptions
from infer.conditions import conditions, describe
from infer.differences import Difference, first_difference
from infer.errors import InputError
from infer.families import Family, load_families
from infer.loading import Loaded
from infer.measurement import Measured, Protocol, best, measure
from infer.memory import bytes_by_layer, key_value_bytes
from infer.options import DecodingOptions, ModelOptions
from infer.prompts import Prompts
from infer.terminal import Terminal

_TEMPERATURE, _TOP_P = 0.8, 0.95  # of the sampled mode


def compare(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Measure all arms; print a table, then the same as one line of JSON. Returns the exit code, 0.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    loaded, families = load_families(model, options)
    validation = encode(loaded, prompts.validation, options)
    test = encode(loaded, prompts.test, options)
    arguments = modes(options)["greedy"].generate_arguments()
    chosen, tried = choose(loaded, families, Protocol(validation, arguments), terminal)
    result: dict[str, Any] = {
        "model": name_of(loaded),
        "conditions": conditions(loaded.model) | scope(options, prompts, len(test)),
        "validation": tried,
    }
    for name, decoding in modes(options).items():
        protocol = Protocol(test, decoding.generate_arguments(), options.repeats, options.seed)
        arms = [
            arm for arm, family in zip(chosen, families, strict=True) if name == "sampled" or not family.sampled_only
        ]
        result[name] = measure_arms(loaded, arms, protocol, terminal)
    for name in modes(options):
        show(result, name, terminal)
    write(result, options)
    return 0


def check(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Whether greedy self-speculation gives plain decoding's tokens in float32, for every arm of ours, setting and
    prompt.

    Returns:
        The exit code: 0 if all outputs are equal, 1 if not.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    options = replace(options, repeats=1)
    loaded, families = load_families(replace(model, dtype="float32"), options)
    arguments = DecodingOptions(max_new_tokens=options.max_new_tokens).generate_arguments()
    protocol = Protocol(encode(loaded, prompts.test, options), arguments)
    ours = [family for family in families if family.name not in ("plain", "loop", "early-exit", "block", "coupled")]
    arms = [plain(), *(arm for family in ours for arm in family.arms)]
    records = measure_arms(loaded, arms, protocol, terminal)[1:]
    for arm, record in zip(arms[1:], records, strict=True):
        if record["error"] is not None:
            print(f"{arm.label}: {record['error']}")
        else:
            print(f"{arm.label}: {record['equal_outputs']} of {record['num_outputs']} greedy float32 outputs equal")
        for line in report.explain(record):
            print(line)
    exact = all(record.get("equal_outputs", 0) == len(protocol.prompts) for record in records)
    found = conditions(loaded.model) | scope(options, prompts, len(protocol.prompts))
    write({"model": name_of(loaded), "conditions": found, "exact": exact, "check": records}, options)
    return 0 if exact else 1


def modes(options: BenchmarkOptions) -> dict[str, DecodingOptions]:
    """How to decode, by name: greedy, and sampled if that is asked for."""
    found = {"greedy": DecodingOptions(max_new_tokens=options.max_new_tokens)}
    if options.sampled:
        found["sampled"] = replace(found["greedy"], temperature=_TEMPERATURE, top_p=_TOP_P)
    return found


def in_mode(name: str, chosen: Sequence[Arm], families: Sequence[Family]) -> list[Arm]:
    """Of the arms chosen of the families, those that are measured in this mode."""
    pairs = zip(chosen, families, strict=True)
    return [arm for arm, family in pairs if name == "sampled" or not family.sampled_only]


def encode(loaded: Loaded, texts: Sequence[str], options: BenchmarkOptions) -> list[Tensor]:
    """The first `num_prompts` texts that are not empty, as (1, length) ids of at most `prompt_tokens` tokens.

    Raises:
        InputError: if prompt and output do not fit the model together.
    """
    limit, longest = loaded.max_positions, options.prompt_tokens + options.max_new_tokens
    if limit is not None and longest > limit:
        raise InputError(
            f"--prompt-tokens {options.prompt_tokens} and --max-new-tokens {options.max_new_tokens} make "
            f"{longest}, but the model has {limit} positions: lower one"
        )
    encoded = (loaded.tokenizer(text)["input_ids"][: options.prompt_tokens] for text in texts)
    some = [ids for ids in encoded if ids][: options.num_prompts]
    return [torch.tensor([ids], device=loaded.model.device) for ids in some]


def choose(
    loaded: Loaded, families: Sequence[Family], protocol: Protocol, terminal: Terminal
) -> tuple[list[Arm], list[dict[str, Any]]]:
    """The fastest arm of each family on the protocol's prompts, and the records of all that were tried."""
    if all(len(family.arms) == 1 for family in families):
        return [family.arms[0] for family in families], []
    arms = [plain(), *(arm for family in families if len(family.arms) > 1 for arm in family.arms)]
    with terminal.progress(protocol.num_calls(len(arms))) as advance:
        measured = measure(loaded.model, arms, protocol, lambda label: advance(f"choosing: {label}"))
    by_label = {entry.arm.label: entry for entry in measured}
    chosen = []
    for family in families:
        winner = best([by_label[arm.label] for arm in family.arms]) if len(family.arms) > 1 else None
        # Where all of a family fail, one of them shows so.
        chosen.append(winner.arm if winner else family.arms[0])
    return chosen, [report.record(entry, measured[0], None) for entry in measured]


def measure_arms(loaded: Loaded, arms: list[Arm], protocol: Protocol, terminal: Terminal) -> list[dict[str, Any]]:
    """The arms' records; the first arm is the baseline."""
    with terminal.progress(protocol.num_calls(len(arms))) as advance:
        measured = measure(loaded.model, arms, protocol, advance)
    baseline = measured[0]
    if baseline.error is not None:
        raise InputError(
            f"plain decoding fails on {loaded.name}, so there is nothing to compare with: {baseline.error}"
        )
    greedy, sizes = not protocol.arguments["do_sample"], bytes_by_layer(loaded.model)
    records = []
    for entry in measured:
        differences = _differences(loaded, protocol, entry, baseline) if greedy else None
        memory = key_value_bytes(entry.arm, entry.longest(protocol.prompts), sizes) if entry.error is None else None
        records.append(report.record(entry, baseline, differences, memory))
    return records


def _differences(loaded: Loaded, protocol: Protocol, entry: Measured, baseline: Measured) -> list[Difference | None]:
    if entry.error is not None:
        return []
    outputs = zip(protocol.prompts, baseline.outputs[0], entry.outputs[0], strict=True)
    return [
        first_difference(loaded.model, prompt, expected.tokens, actual.tokens) for prompt, expected, actual in outputs
    ]


def name_of(loaded: Loaded) -> str:
    """The Hub id, or the folder's own name: a record may be published, and a path concerns nobody else."""
    path = Path(loaded.name).expanduser()
    return path.resolve().name if path.is_dir() else loaded.name


def scope(options: BenchmarkOptions, prompts: Prompts, num_prompts: int) -> dict[str, Any]:
    return {
        "prompts": prompts.source,
        "num_prompts": num_prompts,
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "seed": options.seed,
        "sampling": {"temperature": _TEMPERATURE, "top_p": _TOP_P} if options.sampled else None,
    }


def show(result: dict[str, Any], mode: str, terminal: Terminal) -> None:
    """The tables of one mode, and a line for each output that differs."""
    scope = result["conditions"]
    title = (
        f"{result['model']}, {mode}: {scope['num_prompts']} prompts ({scope['prompts']}) of at most "
        f"{scope['prompt_tokens']} tokens, {scope['max_new_tokens']} new tokens, {scope['repeats']} repeats"
    )
    records = result[mode]
    terminal.table(title, report.COLUMNS, [report.row(record) for record in records], describe(scope))
    memory = [report.memory_row(record) for record in records]
    terminal.table(f"memory, {mode}", report.MEMORY_COLUMNS, memory, report.MEMORY_NOTE)
    for line in (line for record in records for line in report.explain(record)):
        print(line)


def write(result: dict[str, Any], options: BenchmarkOptions) -> None:
    """The record as the last line of standard output, and in a file if asked for."""
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps(result, allow_nan=False))
