"""The benchmark itself: choose each family's setting on validation prompts, report on test prompts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer import report
from infer.arms import Arm, assistant_early_exit, plain, plain_loop, self_speculative
from infer.benchmark import BenchmarkOptions
from infer.conditions import conditions, describe
from infer.differences import Difference, first_difference
from infer.errors import InputError
from infer.loading import Loaded, choose_setting, load
from infer.measurement import Measured, Protocol, best, measure
from infer.options import DecodingOptions, ModelOptions
from infer.prompts import Prompts
from infer.terminal import Terminal
from layerskip.settings import Setting

# Families of arms that have a setting, each with a best one of its own.
_FAMILIES: tuple[Callable[[Setting], Arm], ...] = (self_speculative, assistant_early_exit)
_TEMPERATURE, _TOP_P = 0.8, 0.95  # of the sampled mode


def compare(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Measure all arms; print a table, then the same as one line of JSON. Returns the exit code, 0.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    loaded, settings = _load(model, options)
    validation = encode(loaded, prompts.validation, options)
    test = encode(loaded, prompts.test, options)
    modes = {"greedy": DecodingOptions(max_new_tokens=options.max_new_tokens)}
    if options.sampled:
        modes["sampled"] = replace(modes["greedy"], temperature=_TEMPERATURE, top_p=_TOP_P)
    arguments = modes["greedy"].generate_arguments()
    chosen, tried = _choose(loaded, settings, Protocol(validation, arguments), terminal)
    result: dict[str, Any] = {
        "model": _name(loaded),
        "conditions": conditions(loaded.model) | _scope(options, prompts, len(test)),
        "validation": tried,
    }
    for name, decoding in modes.items():
        protocol = Protocol(test, decoding.generate_arguments(), options.repeats, options.seed)
        result[name] = _measure_arms(loaded, [plain(), plain_loop(), *chosen], protocol, terminal)
    for name in modes:
        _show(result, name, terminal)
    _write(result, options)
    return 0


def check(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Whether greedy self-speculation gives plain decoding's tokens in float32, for every setting and prompt.

    Returns:
        The exit code: 0 if all outputs are equal, 1 if not.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    options = replace(options, repeats=1)
    loaded, settings = _load(replace(model, dtype="float32"), options)
    arguments = DecodingOptions(max_new_tokens=options.max_new_tokens).generate_arguments()
    protocol = Protocol(encode(loaded, prompts.test, options), arguments)
    arms = [plain(), *(self_speculative(setting) for setting in settings)]
    records = _measure_arms(loaded, arms, protocol, terminal)[1:]
    for record in records:
        head = f"exit_layer {record['exit_layer']}, num_draft_tokens {record['num_draft_tokens']}"
        if record["error"] is not None:
            print(f"{head}: {record['error']}")
        else:
            print(f"{head}: {record['equal_outputs']} of {record['num_outputs']} greedy float32 outputs equal")
        for line in report.explain(record):
            print(line)
    exact = all(record.get("equal_outputs", 0) == len(protocol.prompts) for record in records)
    found = conditions(loaded.model) | _scope(options, prompts, len(protocol.prompts))
    _write({"model": _name(loaded), "conditions": found, "exact": exact, "check": records}, options)
    return 0 if exact else 1


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


def _load(model: ModelOptions, options: BenchmarkOptions) -> tuple[Loaded, list[Setting]]:
    loaded = load(model, options.exit_layers or ())
    tuned = choose_setting(loaded, "tuned", "tuned")
    exit_layers = options.exit_layers or ((tuned.exit_layer,) if tuned else ())
    if not exit_layers or None in exit_layers:
        raise InputError(
            f"{loaded.name} carries no tuned exit layer to measure: give --exit-layers, for instance "
            f"--exit-layers 2,3 --num-draft-tokens 3,4 to choose from"
        )
    lengths: Sequence[int] = options.num_draft_tokens or (tuned.num_draft_tokens if tuned else 4,)
    return loaded, [Setting(*pair) for pair in product(exit_layers, lengths)]


def _choose(
    loaded: Loaded, settings: list[Setting], protocol: Protocol, terminal: Terminal
) -> tuple[list[Arm], list[dict[str, Any]]]:
    """The fastest arm of each family on the protocol's prompts, and the records of all that were tried."""
    if len(settings) == 1:
        return [family(settings[0]) for family in _FAMILIES], []
    families = [[family(setting) for setting in settings] for family in _FAMILIES]
    arms = [plain(), *(arm for family in families for arm in family)]
    with terminal.progress(protocol.num_calls(len(arms))) as advance:
        measured = measure(loaded.model, arms, protocol, lambda label: advance(f"choosing: {label}"))
    by_label = {entry.arm.label: entry for entry in measured}
    winners = [best([by_label[arm.label] for arm in family]) for family in families]
    # Where all of a family fail, one of them shows so.
    chosen = [winner.arm if winner else family[0] for winner, family in zip(winners, families, strict=True)]
    return chosen, [report.record(entry, measured[0], None) for entry in measured]


def _measure_arms(loaded: Loaded, arms: list[Arm], protocol: Protocol, terminal: Terminal) -> list[dict[str, Any]]:
    """The arms' records; the first arm is the baseline."""
    with terminal.progress(protocol.num_calls(len(arms))) as advance:
        measured = measure(loaded.model, arms, protocol, advance)
    baseline = measured[0]
    if baseline.error is not None:
        raise InputError(
            f"plain decoding fails on {loaded.name}, so there is nothing to compare with: {baseline.error}"
        )
    greedy = not protocol.arguments["do_sample"]
    return [
        report.record(entry, baseline, _differences(loaded, protocol, entry, baseline) if greedy else None)
        for entry in measured
    ]


def _differences(loaded: Loaded, protocol: Protocol, entry: Measured, baseline: Measured) -> list[Difference | None]:
    if entry.error is not None:
        return []
    outputs = zip(protocol.prompts, baseline.outputs[0], entry.outputs[0], strict=True)
    return [
        first_difference(loaded.model, prompt, expected.tokens, actual.tokens) for prompt, expected, actual in outputs
    ]


def _name(loaded: Loaded) -> str:
    """The Hub id, or the folder's own name: a record may be published, and a path concerns nobody else."""
    path = Path(loaded.name).expanduser()
    return path.resolve().name if path.is_dir() else loaded.name


def _scope(options: BenchmarkOptions, prompts: Prompts, num_prompts: int) -> dict[str, Any]:
    return {
        "prompts": prompts.source,
        "num_prompts": num_prompts,
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "seed": options.seed,
        "sampling": {"temperature": _TEMPERATURE, "top_p": _TOP_P} if options.sampled else None,
    }


def _show(result: dict[str, Any], mode: str, terminal: Terminal) -> None:
    scope = result["conditions"]
    title = (
        f"{result['model']}, {mode}: {scope['num_prompts']} prompts ({scope['prompts']}) of at most "
        f"{scope['prompt_tokens']} tokens, {scope['max_new_tokens']} new tokens, {scope['repeats']} repeats"
    )
    records = result[mode]
    terminal.table(title, report.COLUMNS, [report.row(record) for record in records], describe(scope))
    for line in (line for record in records for line in report.explain(record)):
        print(line)


def _write(result: dict[str, Any], options: BenchmarkOptions) -> None:
    """The record as the last line of standard output, and in a file if asked for."""
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps(result, allow_nan=False))
