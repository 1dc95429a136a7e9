"""The benchmark itself: choose each family's setting on validation prompts, report on test prompts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infer.benchmark import BenchmarkOptions
from infer.benchmarking import report
from infer.benchmarking.arms import Arm, plain
from infer.benchmarking.differences import Difference, first_difference
from infer.benchmarking.families import Family, load_families
from infer.benchmarking.ideal import CostModel, cost_model
from infer.benchmarking.measurement import Measured, Protocol, best, measure
from infer.benchmarking.memory import bytes_by_layer, key_value_bytes
from infer.benchmarking.output import modes, name_of, scope, show, write
from infer.benchmarking.questions import all_questions, encode, extent
from infer.benchmarking.record import record
from infer.benchmarking.spec_bench import by_category, show_categories, write_answers
from infer.conditions import conditions
from infer.errors import InputError
from infer.loading import Loaded
from infer.options import DecodingOptions, ModelOptions
from infer.prompts import Prompts
from infer.terminal import Terminal


def compare(model: ModelOptions, options: BenchmarkOptions, prompts: Prompts, terminal: Terminal) -> int:
    """Measure all arms; print a table, then the same as one line of JSON. Returns the exit code, 0.

    Raises:
        InputError: if the model or the settings cannot be used.
    """
    loaded, families = load_families(model, options)
    validation = encode(loaded, prompts.validation, options)
    questions = all_questions(loaded, prompts.test, options, terminal)
    test = [question.input_ids for question in questions]
    arguments = modes(options)["greedy"].generate_arguments()
    choosing = Protocol(validation, arguments, seed=options.seed, timeout=options.timeout)
    chosen, tried = choose(loaded, families, choosing, terminal)
    result: dict[str, Any] = {
        "model": name_of(loaded),
        "conditions": conditions(loaded.model) | scope(options, prompts, test) | extent(questions),
        "validation": tried,
        "costs": {},
    }
    for name, decoding in modes(options).items():
        protocol = Protocol(test, decoding.generate_arguments(), options.repeats, options.seed, options.timeout)
        arms = in_mode(name, chosen, families)
        measured = run_arms(loaded, arms, protocol, terminal)
        result[name] = records_of(loaded, measured, protocol)
        if any(question.prompt.category is not None for question in questions):
            for entry, found in zip(measured, result[name], strict=True):
                found["by_category"] = by_category(entry, measured[0], questions)
        if options.answers is not None:
            files = write_answers(options.answers, name, loaded, name_of(loaded), measured, questions)
            terminal.note(f"wrote {', '.join(map(str, files))}")
        compared = [*zip(arms, result[name], strict=True)]
        if name == "greedy" and tried:
            compared += zip(rivals(families), tried, strict=True)
        result["costs"][name] = add_ideals(loaded, compared, protocol, terminal)
    for name in modes(options):
        show(result, name, terminal, options.verbose)
        show_categories(result, name, terminal)
    write(result, options, terminal)
    return 0


def add_ideals(
    loaded: Loaded, compared: Sequence[tuple[Arm, dict[str, Any]]], protocol: Protocol, terminal: Terminal
) -> dict[str, Any] | None:
    """Give the arms' records what the cost model says at the acceptance they measured; returns the costs."""
    with terminal.progress(1) as advance:
        costs: CostModel | None = cost_model(loaded, [arm for arm, _ in compared], protocol.prompts, protocol.arguments)
        advance("timed the stages")
    for arm, found in compared:
        found["ideal"] = costs.ideal(arm, found) if costs else None
    return costs.record() if costs else None


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
    protocol = Protocol(encode(loaded, prompts.test, options), arguments, timeout=options.timeout)
    ours = [family for family in families if family.drafts and not family.sampled_only]
    arms = [plain(), *(arm for family in ours for arm in family.arms)]
    records = measure_arms(loaded, arms, protocol, terminal)[1:]
    for arm, found in zip(arms[1:], records, strict=True):
        if found["error"] is not None:
            print(f"{arm.label}: {found['error']}")
        else:
            print(f"{arm.label}: {found['equal_outputs']} of {found['num_outputs']} greedy float32 outputs equal")
        for line in report.explain(found):
            print(line)
    exact = all(found.get("equal_outputs", 0) == len(protocol.prompts) for found in records)
    known = conditions(loaded.model) | scope(options, prompts, protocol.prompts)
    write({"model": name_of(loaded), "conditions": known, "exact": exact, "check": records}, options, terminal)
    return 0 if exact else 1


def in_mode(name: str, chosen: Sequence[Arm], families: Sequence[Family]) -> list[Arm]:
    """Of the arms chosen of the families, those that are measured in this mode."""
    pairs = zip(chosen, families, strict=True)
    return [arm for arm, family in pairs if name == "sampled" or not family.sampled_only]


def choose(
    loaded: Loaded, families: Sequence[Family], protocol: Protocol, terminal: Terminal
) -> tuple[list[Arm], list[dict[str, Any]]]:
    """The fastest arm of each family on the protocol's prompts, and the records of all that were tried."""
    if all(len(family.arms) == 1 for family in families):
        return [family.arms[0] for family in families], []
    arms = rivals(families)
    with terminal.progress(protocol.num_calls(len(arms))) as advance:
        measured = measure(loaded.model, arms, protocol, lambda label: advance(f"choosing: {label}"))
    by_label = {entry.arm.label: entry for entry in measured}
    chosen = []
    for family in families:
        winner = best([by_label[arm.label] for arm in family.arms]) if len(family.arms) > 1 else None
        # Where all of a family fail, one of them shows so.
        chosen.append(winner.arm if winner else family.arms[0])
    return chosen, [record(entry, measured[0]) for entry in measured]


def rivals(families: Sequence[Family]) -> list[Arm]:
    """Plain decoding, and the arms of the families that there is something to choose in."""
    return [plain(), *(arm for family in families if len(family.arms) > 1 for arm in family.arms)]


def measure_arms(loaded: Loaded, arms: list[Arm], protocol: Protocol, terminal: Terminal) -> list[dict[str, Any]]:
    """The arms' records; the first arm is the baseline."""
    return records_of(loaded, run_arms(loaded, arms, protocol, terminal), protocol)


def run_arms(loaded: Loaded, arms: list[Arm], protocol: Protocol, terminal: Terminal) -> list[Measured]:
    """What the arms brought; the first one is the baseline.

    Raises:
        InputError: if the baseline fails.
    """
    with terminal.progress(protocol.num_calls(len(arms))) as advance:
        measured = measure(loaded.model, arms, protocol, advance)
    baseline = measured[0]
    if baseline.error is not None:
        raise InputError(
            f"plain decoding fails on {loaded.name}, so there is nothing to compare with: {baseline.error}"
        )
    return measured


def records_of(loaded: Loaded, measured: Sequence[Measured], protocol: Protocol) -> list[dict[str, Any]]:
    """For JSON; the first is the baseline."""
    baseline = measured[0]
    greedy, sizes = not protocol.arguments["do_sample"], bytes_by_layer(loaded.model)
    records = []
    for entry in measured:
        differences = _differences(loaded, protocol, entry, baseline) if greedy else None
        memory = key_value_bytes(entry.arm, entry.longest(protocol.prompts), sizes) if entry.error is None else None
        records.append(_with_texts(record(entry, baseline, differences, memory), loaded))
    return records


def _differences(
    loaded: Loaded, protocol: Protocol, entry: Measured, baseline: Measured
) -> dict[int, Difference | None]:
    """By prompt, of the first repeat in which both came to their end."""
    found: dict[int, Difference | None] = {}
    for theirs, mine in zip(baseline.outputs, entry.outputs, strict=True):
        for index, (expected, actual) in enumerate(zip(theirs, mine, strict=True)):
            if index not in found and expected is not None and actual is not None:
                prompt = protocol.prompts[index]
                found[index] = first_difference(loaded.model, prompt, expected.tokens, actual.tokens)
    return found


def _with_texts(found: dict[str, Any], loaded: Loaded) -> dict[str, Any]:
    """Say what the tokens are where an output differs."""
    for each in found.get("differences", []):
        for name in ("expected", "actual"):
            each[f"{name}_text"] = None if each[name] is None else loaded.tokenizer.decode([each[name]])
    return found
