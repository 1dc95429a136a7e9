"""What `evaluate` found: tables for people."""

from collections.abc import Sequence
from typing import Any

from infer.conditions import describe
from infer.terminal import Terminal

COLUMNS = ("exit", "head", "loss", "perplexity", "agreement", "1 - TV")


def show_text(result: dict[str, Any], terminal: Terminal) -> None:
    """The exits on text."""
    scope = result["conditions"]
    read = (
        f"{scope['max_new_tokens']} tokens each that the model wrote after them, greedily"
        if scope["own_text"]
        else f"windows of {scope['window']} tokens, advancing by {scope['stride']}"
    )
    title = f"{result['model']}: {scope['num_tokens']} tokens of {scope['num_texts']} texts ({scope['text']}), {read}"
    caption = (
        "loss: nats a token; agreement: share of tokens where the most probable one is the last layer's; 1 - TV: "
        f"chance that a sampled draft is accepted, at temperature 1. {describe(scope)}"
    )
    terminal.table(title, COLUMNS, text_rows(result["exits"]), caption)


def text_rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line each; a cut head, which leaves tokens out, has no loss."""
    rows = []
    for record in records:
        is_model = record is records[-1]
        name = f"{record['exit_layer']} (model)" if is_model else str(record["exit_layer"])
        loss, perplexity = (_number(record[key]) for key in ("loss", "perplexity"))
        shares = ("-", "-") if is_model else (f"{record['agreement']:.3f}", f"{record['overlap']:.3f}")
        head = record["head"] + (", adapter" if record["adapter"] else "")
        rows.append([name, head, loss, perplexity, *shares])
    return rows


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1000 else f"{value:.4g}"


def show_tasks(result: dict[str, Any], terminal: Terminal) -> None:
    """All sides on the tasks, side by side."""
    sides = result["tasks"]
    scope = result["conditions"]
    title = f"{result['model']}: tasks of lm-evaluation-harness {scope['lm_eval']}"
    caption = (
        "value ± standard error, as the harness has them. An exit alone ends at that layer: its head says what is "
        f"written, nothing verifies it. Self-speculative decoding writes the model's own answers. {describe(scope)}"
    )
    terminal.table(title, ("task", "metric", *(side["side"] for side in sides)), task_rows(sides), caption)


def task_rows(sides: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each task and metric, and what is known of the written answers below."""
    tables = [{(r["task"], r["metric"], r["filter"]): r for r in side["results"]} for side in sides]
    rows = []
    for task, metric, filtered in tables[0]:
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        rows.append([task, name, *(_score(table.get((task, metric, filtered))) for table in tables)])
    if any("num_answers" in side for side in sides):
        counts = [f"{s['equal_answers']} of {s['num_answers']}" if "num_answers" in s else "" for s in sides]
        rows.append(["written answers", "equal to the model's", *counts])
    if any("mean_acceptance_length" in side for side in sides):
        lengths = [f"{s['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in s else "" for s in sides]
        rows.append(["", "tokens a verify step", *lengths])
    return rows


def _score(record: dict[str, Any] | None) -> str:
    if record is None:
        return "as the model"
    stderr = "" if record["stderr"] is None else f" ± {record['stderr']:.4f}"
    return f"{record['value']:.4f}{stderr}"
