"""Speed by category of task, and what arms answered, in the format that Spec-Bench's scripts read.

Spec-Bench (Xia et al. 2024, arXiv 2401.07851): a question is a line {"question_id", "category", "turns"}, an answer one
of {"question_id", "category", "answer_id", "model_id", "choices": [{"index", "turns", "decoding_steps", "new_tokens",
"wall_time", "accept_lengths"}], "tstamp"}, a file for each way to decode. Its speed is the mean over questions of
sum(new_tokens) / sum(wall_time), its "mean accepted tokens" the mean of accept_lengths; it counts the baseline's tokens
by tokenizing its answers again, and takes the first choice only.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer.benchmarking.arms import Output
from infer.benchmarking.measurement import Measured
from infer.benchmarking.questions import Question, answer_text
from infer.benchmarking.report import cell, label
from infer.loading import Loaded
from infer.terminal import Terminal

# Of MT-Bench, whose categories Spec-Bench reports as one.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def by_category(measured: Measured, baseline: Measured, questions: Sequence[Question]) -> dict[str, dict[str, Any]]:
    """What an arm brought on each category's questions; empty where no prompt has one, or the arm failed."""
    kinds: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        if question.prompt.category is not None:
            kinds.setdefault(question.prompt.category, []).append(index)
    of_mt_bench = [name for name in MT_BENCH if name in kinds]
    if len(of_mt_bench) > 1:
        kinds["mt_bench"] = sorted(index for name in of_mt_bench for index in kinds[name])
    if measured.error is not None:
        return {}
    return {name: _part(_only(measured, rows), _only(baseline, rows)) for name, rows in kinds.items()}


def _only(measured: Measured, indices: Sequence[int]) -> Measured:
    return replace(measured, outputs=[[row[index] for index in indices] for row in measured.outputs])


def _part(mine: Measured, theirs: Measured) -> dict[str, Any]:
    counts, speedup = mine.statistics, mine.speedup(theirs)
    return {
        "num_calls": len(mine.calls),
        "tokens": mine.num_tokens,
        "tokens_per_second": round(mine.tokens_per_second, 3) if mine.calls else None,
        "speedup": None if speedup is None else round(speedup, 4),
        "mean_acceptance_length": round(counts.mean_acceptance_length, 4) if counts and counts.num_steps else None,
    }


def show_categories(result: dict[str, Any], mode: str, terminal: Terminal) -> None:
    """A row of speedups for each category, with the tokens a verify step committed; nothing where there are none."""
    records = [record for record in result[mode][1:] if record.get("by_category")]
    if not records:
        return
    baseline = result[mode][0]["by_category"]
    columns = ("category", "calls", "plain tokens/s", *(label(record) for record in records))
    rows = [
        [name, str(plain["num_calls"]), cell(plain["tokens_per_second"], ".1f")]
        + [_cell(record["by_category"][name]) for record in records]
        for name, plain in baseline.items()
    ]
    note = "Times plain decoding's tokens/s; in brackets the tokens that a verify step committed."
    terminal.table(f"{result['model']}, {mode}, speedup by category", columns, rows, note)


def _cell(part: dict[str, Any]) -> str:
    length = part["mean_acceptance_length"]
    return cell(part["speedup"], ".2f") + ("" if length is None else f" ({length:.2f})")


def write_answers(
    folder: Path, mode: str, loaded: Loaded, name: str, measured: Sequence[Measured], questions: Sequence[Question]
) -> list[Path]:
    """Write a file of answers for each arm that has some; a choice for each repeat in which all turns were answered.

    Args:
        mode: "greedy" or "sampled"; names of files of the latter begin with it.
        name: of the model.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix, files = "" if mode == "greedy" else f"{mode}-", []
    for entry in measured:
        records = _answers(loaded, name, entry, questions) if entry.error is None else []
        if records:
            file = folder / f"{prefix}{entry.arm.name.replace(' ', '-')}.jsonl"
            lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            file.write_text("".join(lines), encoding="utf-8")
            files.append(file)
    return files


def _answers(loaded: Loaded, name: str, entry: Measured, questions: Sequence[Question]) -> list[dict[str, Any]]:
    starts = [index for index, question in enumerate(questions) if question.turn == 0]
    records = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(questions)], strict=True), start=1):
        prompt = questions[start].prompt
        answered = [(index, row[start:end]) for index, row in enumerate(entry.outputs)]
        choices = [
            _choice(loaded, index, [output for output in outputs if output is not None])
            for index, outputs in answered
            if None not in outputs
        ]
        record = {
            "question_id": number if prompt.question_id is None else prompt.question_id,
            "category": prompt.category or "none",
            "answer_id": uuid.uuid4().hex,
            "model_id": f"{name}, {entry.arm.label}",
            "choices": choices,
            "tstamp": time.time(),
        }
        records += [record] if choices else []
    return records


def _choice(loaded: Loaded, index: int, outputs: Sequence[Output]) -> dict[str, Any]:
    """The answers to all turns of a question, in one repeat."""
    steps = [[tokens for _, tokens in output.timing.bursts] if output.timing else [] for output in outputs]
    return {
        "index": index,
        "turns": [answer_text(loaded, output.tokens) for output in outputs],
        "decoding_steps": [len(lengths) for lengths in steps],
        "new_tokens": [len(output.tokens) for output in outputs],
        "wall_time": [output.seconds for output in outputs],
        "accept_lengths": [length for lengths in steps for length in lengths],
    }
