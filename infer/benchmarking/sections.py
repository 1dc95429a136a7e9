"""The sections of a benchmark's page: tables and plots of the arms, of the differences, of the batches."""

from typing import Any

from infer.benchmarking import figures as draw
from infer.benchmarking import page_parts as html
from infer.benchmarking import report
from infer.conditions import describe

Records = draw.Records


def mode_sections(result: dict[str, Any], mode: str) -> list[str]:
    """Of the arms in one mode, greedy or sampled: the fastest to be seen, every number, what differs."""
    records, said = result[mode], describe(result["conditions"])
    tried = result.get("validation", []) if mode == "greedy" else []
    return [
        html.section(f"Speed, {mode}", _table(records, said), html.figures(_images(records, tried, mode))),
        html.section(f"Every arm's numbers, {mode}", *_tables(records, said)),
        html.section(
            f"Where outputs differ, {mode}",
            _differences(records),
            lead="The first token that is not plain generate's. Margin: between its two best logits there; gap: from "
            "the best to the lower of the two chosen; rounding: what logits change when the same tokens pass in other "
            "chunks.",
        ),
    ]


def _images(records: Records, tried: Records, mode: str) -> list[tuple[draw.Images, str, str]]:
    """The figures, what each shows and how to read it."""
    return [
        (
            draw.speedups(records),
            f"speedup of each arm, {mode}",
            "Bars: all calls. Line: least and most of a repeat. Dots: each prompt. Diamonds: without prefill.",
        ),
        (
            draw.parts(records),
            f"milliseconds a token by part, {mode}",
            "Shorter is faster. A round's draft, verification and rollback, over the tokens it commits.",
        ),
        (
            draw.acceptance(records),
            f"acceptance by draft position, {mode}",
            "Of the rounds that drafted a token there; a lookup drafts long only where it found much.",
        ),
        (
            draw.against_ideal(records, tried),
            f"measured speedup and the cost model's, {mode}",
            "At the acceptance that was measured: what rounds could bring if they took no longer than their "
            "stages timed alone here, or than reading the weights.",
        ),
        (
            draw.grid(tried),
            "speedup by exit layer and draft length",
            "On the validation prompts, with which the setting was chosen; the tables are of other prompts.",
        ),
    ]


def _table(records: Records, said: str) -> str:
    rows = [[draw.label(record), *report.row(record)[4:], *_medians(record)] for record in records]
    fastest = max(records, key=lambda record: record.get("speedup") or 0)
    for record, row in zip(records, rows, strict=True):
        row[0] += f": failed, {record['error']}" if record["error"] else ""
    marks = ["bad" if record["error"] else "strong" if record is fastest else "" for record in records]
    return html.table(("arm", *report.COLUMNS[4:], "CPU", "TTFT ms", "TPOT ms"), rows, said, marks)


def _medians(record: dict[str, Any]) -> list[str]:
    cpu, latency = record.get("processor_speedup"), record.get("latency") or {}
    found = [latency.get(name) for name in ("ttft", "tpot")]
    return ["-" if cpu is None else f"{cpu:.2f}", *("-" if m is None else f"{1000 * m['median']:.1f}" for m in found)]


def _tables(records: Records, said: str) -> list[str]:
    found = []
    for name, columns, rows, note in report.tables(records, verbose=True):
        found += [html.heading(name.capitalize(), 3), html.table(columns, rows, f"{note} {said}")]
    categories = [record for record in records if record.get("by_category")]
    if categories:
        columns = ["category", *(draw.label(record) for record in categories)]
        cells = [
            [name, *(_category(record["by_category"].get(name)) for record in categories)]
            for name in categories[0]["by_category"]
        ]
        note = "Times plain generate's tokens/s; in brackets the tokens a verify step commits."
        found += [html.heading("By category", 3), html.table(columns, cells, f"{note} {said}")]
    failures = [
        [record["arm"], str(each["prompt"]), str(each["repeat"]), each["reason"]]
        for record in records
        for each in record["failures"]
    ]
    if failures:
        columns = ["arm", "prompt", "repeat", "why"]
        found += [html.heading("Calls that brought nothing", 3), html.table(columns, failures, text=True)]
    return found


def _category(part: dict[str, Any] | None) -> str:
    if part is None or part["speedup"] is None:
        return "-"
    length = part["mean_acceptance_length"]
    return f"{part['speedup']:.2f}" + ("" if length is None else f" ({length:.2f})")


def _differences(records: Records) -> str:
    rows, marks = [], []
    found = [(record, each) for record in records for each in record.get("differences", [])]
    for record, each in found:
        tokens = [
            "(ended)" if each[name] is None else f"{each[name]} {each.get(f'{name}_text', '')!r}"
            for name in ("expected", "actual")
        ]
        numbers = [f"{each[name]:.2g}" for name in ("margin", "gap", "rounding")]
        verdict = "near-tie" if each["near_tie"] else "FAULT"
        rows.append([draw.label(record), str(each["prompt"]), str(each["position"]), *tokens, *numbers, verdict])
        marks.append("" if each["near_tie"] else "bad")
    columns = ("arm", "prompt", "token", "plain generate's", "this arm's", "margin", "gap", "rounding", "verdict")
    return html.table(columns, rows, marks=marks)


def batch_section(mode: str, records: Records, said: str) -> str:
    """Of batches of every size, in one mode; `said`: the conditions."""
    names = ("plain_tokens_per_second", "tokens_per_second", "ratio", "mean_acceptance_length")
    rows = [
        [draw.label(record), str(record["batch_size"])]
        + (
            [f"{record[name]:.2f}" for name in names] + [report.equal(record)]
            if record["error"] is None
            else ["-"] * 4 + [f"failed: {record['error']}"]
        )
        for record in records
    ]
    columns = ("arm", "batch", "plain tokens/s", "tokens/s", "speedup", "accepted", "equal")
    caption = "Against plain generate of the same batch, padded to its longest prompt."
    image = html.figures([(draw.batches(records), f"speedup by batch size, {mode}", caption)])
    return html.section(f"Batches, {mode}", html.table(columns, rows, said), image)
