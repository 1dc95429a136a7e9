"""Records of `python -m infer benchmark` as the README's tables: lines of Markdown."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    *("", "exit / drafts", "× plain `generate`", "spread", "by processor time"),
    *("tokens a round", "accepted", "equal"),
)


def arms(found: list[dict[str, Any]]) -> list[str]:
    """The arms of a record's greedy or sampled part, a row of `COLUMNS` each."""
    rows = []
    for arm in found:
        setting = "-" if arm["drafts"] is None else f"{arm['exit_layer'] or '-'} / {arm['drafts']}"
        if arm["error"] is not None:
            rows.append(line(arm["arm"], setting, f"failed: {arm['error']}", *["-"] * 5))
            continue
        repeats, drafted = arm.get("speedup_by_repeat") or [], arm.get("draft_acceptance_rate")
        rows.append(
            line(
                *(arm["arm"], setting, number(arm.get("speedup"))),
                f"{min(repeats):.2f}-{max(repeats):.2f}" if len(repeats) > 1 else "-",
                number(arm.get("processor_speedup")),
                number(arm.get("mean_acceptance_length")),
                number(drafted),
                equal(arm),
            )
        )
    return [*header(COLUMNS), *rows]


def equal(arm: dict[str, Any]) -> str:
    """Outputs equal to plain decoding's, of all; sampled ones are not compared."""
    if "equal_outputs" not in arm:
        return "-"
    faults = f", {arm['faults']} faults" if arm.get("faults") else ""
    return f"{arm['equal_outputs']}/{arm['num_outputs']}{faults}"


def batches(found: dict[str, Any]) -> list[str]:
    """A row for each arm, a column for each batch size."""
    records = found["batches"]["greedy"]
    sizes = sorted({each["batch_size"] for each in records})
    rows = list(header(("× plain `generate` at the same batch", *map(str, sizes))))
    for name in dict.fromkeys(each["arm"] for each in records):
        ratios = {each["batch_size"]: each.get("ratio") for each in records if each["arm"] == name}
        rows.append(line(name, *(number(ratios.get(size)) for size in sizes)))
    return rows


def budget(found: dict[str, Any]) -> list[str]:
    """The chain and the fastest tree of each budget, by the names that `budget_arms` gives them."""
    rows = list(header(("", "shape", "× plain `generate`", "tokens a round", "accepted")))
    groups: list[list[dict[str, Any]]] = []
    for each in found["greedy"][1:]:
        if each["arm"].startswith("chain"):
            groups.append([])
        groups[-1].append(each)
    for chain, *trees in groups:
        running = [each for each in trees if each["error"] is None]
        best = max(running, key=lambda each: each["tokens_per_second"], default=None)
        for label, each in (("chain", chain), (f"the fastest of {len(trees)} trees", best)):
            if each is not None and each["error"] is None:
                names = ("speedup", "mean_acceptance_length", "draft_acceptance_rate")
                rows.append(line(label, each["drafts"], *(number(each.get(name)) for name in names)))
    return rows


def conditions(found: dict[str, Any]) -> str:
    """What the numbers hold for."""
    c = found["conditions"]
    lengths = f"{c['num_prompts']} prompts of at most {c['prompt_tokens']} tokens, {c['max_new_tokens']} new ones"
    machine = f"{c['cpu']}, {c['threads']} thread, load average {c['load_average']:.0f} on {c['cores']} cores"
    versions = (
        f"torch {c['torch'].split('+')[0]}, transformers {c['transformers']}, commit {(c['commit'] or 'unknown')[:9]}"
    )
    model = f"{c['dtype']}, {c['attention']} attention"
    return f"{machine}; {model}; {versions}; {lengths}; {c['repeats']} repeats; {c['date'][:10]}."


def header(columns: tuple[str, ...]) -> tuple[str, str]:
    return line(*columns), "|" + "---|" * len(columns)


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
