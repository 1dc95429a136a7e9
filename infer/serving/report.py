"""A load test's numbers: a table, what they mean for drafting, a record and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.benchmarking.arms import Arm
from infer.benchmarking.report import cell, label
from infer.conditions import describe
from infer.serving.arrivals import Level
from infer.terminal import Terminal

# done: requests answered whole, of all; times: median/p95/p99 from arrival.
COLUMNS = ("done", "tokens/s", "requests/s", "TTFT ms", "TPOT ms", "ITL ms", "E2EL s", "equal")
CAPTION = (
    "median/p95/p99 from arrival: TTFT to the first tokens, TPOT (E2EL - TTFT) / (tokens - 1), ITL between bursts of "
    "tokens, E2EL to the last one; equal: outputs equal to plain decoding of the prompt alone"
)


def record(arm: Arm, level: Level, batching: str) -> dict[str, Any]:
    """What was run in one cell, for JSON."""
    setting = arm.setting
    return {
        "arm": arm.name,
        "exit_layer": setting.exit_layer if setting else None,
        "drafts": arm.drafts if setting else None,
        "batching": batching,
        "load": level.label,
        **level.record,
    }


def show(result: dict[str, Any], terminal: Terminal) -> None:
    """The table of each test, and a line for each drafting arm."""
    found, records = result["conditions"], result["load"]
    objective = found["slo_ttft"] is not None or found["slo_tpot"] is not None
    for name, level, cells in tests_of(records):
        title = (
            f"{result['model']}, greedy, {name}: {found['num_requests']} requests x {found['repeats']} "
            f"({found['prompts']}, {found['num_prompts']} prompts) of at most {found['prompt_tokens']} tokens, "
            f"{found['max_new_tokens']} new tokens, at most {found['max_batch_size']} rows"
            + (", processor time" if found["clock"] == "processor" else "")
        )
        columns = ("arm", level, *COLUMNS, *(("good/s",) if objective else ()))
        terminal.table(title, columns, [_row(each, objective) for each in cells], f"{describe(found)}\n{CAPTION}")
    for line in batching_lines(records):
        print(line)
    for line in pays_lines([each for each in records if each["max_concurrency"] is not None]):
        print(line)
    for each in records:
        for error in each["errors"]:
            print(f"{each['arm']}, {each['load']}: {error}")
    if result["interrupted"]:
        print("interrupted: the last row, and what is missing, are not what was asked for")


def tests_of(records: Sequence[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """The closed and the open loop, as far as there are any: name, unit of the load, records."""
    closed = [each for each in records if each["max_concurrency"] is not None]
    opened = [each for each in records if each["max_concurrency"] is None]
    both = (("closed loop", "in flight", closed), ("open loop, Poisson arrivals", "arriving/s", opened))
    return [test for test in both if test[2]]


def batching_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """How the arms make batches, a sentence for each way."""
    meaning = {
        "continuous": "requests join the running batch between two rounds, rows leave it when they end",
        "static": "whoever waits is taken when the batch before has ended",
    }
    arms = {way: list(dict.fromkeys(each["arm"] for each in records if each["batching"] == way)) for way in meaning}
    return [f"{way} batches ({', '.join(arms[way])}): {text}" for way, text in meaning.items() if arms[way]]


def pays_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """For each drafting arm of a closed loop, its throughput over that of each arm which drafts nothing."""
    drafting = dict.fromkeys(each["arm"] for each in records if each["drafts"] is not None)
    baselines = dict.fromkeys(each["arm"] for each in records if each["drafts"] is None)
    return [pays_line(records, arm, baseline) for baseline in baselines for arm in drafting]


def pays_line(records: Sequence[dict[str, Any]], arm: str, baseline: str) -> str:
    """Tokens a second of one over the other by concurrency, and from where on it is no gain."""
    speeds = {(each["arm"], each["max_concurrency"]): each["output_throughput"] for each in records}
    levels = [level for name, level in speeds if name == arm and speeds[arm, level] and speeds.get((baseline, level))]
    ratios = {level: speeds[arm, level] / speeds[baseline, level] for level in levels}
    if not ratios:
        return f"{arm} over {baseline}: nothing to compare"
    said = ", ".join(f"{ratio:.2f} at {level}" for level, ratio in ratios.items())
    paying = [level for level, ratio in ratios.items() if ratio > 1]
    after = [level for level in ratios if not paying or level > paying[-1]]
    if not paying:
        end = "never more"
    elif after:
        end = f"more up to {paying[-1]} in flight, not from {after[0]} on"
    else:
        end = "more at every level"
    return f"{arm} over {baseline}, output tokens/s: {said}: {end}"


def draw(result: dict[str, Any], path: Path) -> None:
    """95th percentiles of TPOT and TTFT against output tokens a second: a curve an arm, a row of panels a test."""
    from matplotlib.figure import Figure

    tests = tests_of([each for each in result["load"] if each["completed"]])
    figure = Figure(figsize=(11, 0.6 + 4 * max(1, len(tests))), layout="constrained")
    panels = figure.subplots(max(1, len(tests)), 2, squeeze=False)
    for row, (name, level, cells) in zip(panels, tests, strict=False):
        for axes, metric in zip(row, ("tpot", "ttft"), strict=True):
            for arm in dict.fromkeys(each["arm"] for each in cells):
                points = [each for each in cells if each["arm"] == arm and each[f"p95_{metric}_ms"] is not None]
                x = [each["output_throughput"] for each in points]
                y = [each[f"p95_{metric}_ms"] for each in points]
                axes.plot(x, y, marker="o", label=arm)
                for each, at in zip(points, zip(x, y, strict=True), strict=True):
                    axes.annotate(_level(each), at, xytext=(4, 4), textcoords="offset points", fontsize=8)
            axes.set_xlabel("output tokens/s")
            axes.set_ylabel(f"p95 {metric.upper()} (ms)")
            axes.set_ylim(bottom=0)
            axes.set_title(f"{name}; numbers: requests {level}", fontsize=10)
            axes.legend(fontsize=8)
    figure.suptitle(f"{result['model']}: latency against throughput")
    figure.savefig(path, dpi=150)


def _level(each: dict[str, Any]) -> str:
    return f"{each['max_concurrency'] or each['request_rate']:g}"


def _row(each: dict[str, Any], objective: bool) -> list[str]:
    cells = [
        label(each),
        _level(each),
        f"{each['completed']}/{each['num_requests']}",
        cell(each["output_throughput"], ".1f"),
        cell(each["request_throughput"], ".2f"),
        *(_times(each, name) for name in ("ttft", "tpot", "itl")),
        _times(each, "e2el", scale=1000, form=".2f"),
        f"{each['equal_outputs']}/{each['completed']}",
    ]
    return [*cells, cell(each["request_goodput"], ".2f")] if objective else cells


def _times(each: dict[str, Any], name: str, scale: float = 1, form: str | None = None) -> str:
    values = [each[f"{word}_{name}_ms"] for word in ("median", "p95", "p99")]
    if None in values:
        return "-"
    form = form or (".0f" if max(values) >= 100 else ".1f")
    return "/".join(format(value / scale, form) for value in values)
