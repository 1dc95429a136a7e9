"""What a comparison puts out: what its numbers are about, tables for people, the record, the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from infer.benchmark import BenchmarkOptions
from infer.benchmarking import report
from infer.conditions import describe, fingerprint, process_peak_bytes
from infer.files import write_record
from infer.loading import Loaded
from infer.options import DecodingOptions
from infer.prompts import Prompts
from infer.terminal import Terminal

TEMPERATURE, TOP_P = 0.8, 0.95  # of the sampled mode


def modes(options: BenchmarkOptions) -> dict[str, DecodingOptions]:
    """How to decode, by name: greedy, and sampled if that is asked for."""
    found = {"greedy": DecodingOptions(max_new_tokens=options.max_new_tokens)}
    if options.sampled:
        found["sampled"] = DecodingOptions(max_new_tokens=options.max_new_tokens, temperature=TEMPERATURE, top_p=TOP_P)
    return found


def name_of(loaded: Loaded) -> str:
    """The Hub id, or the folder's own name: a record may be published, and a path concerns nobody else."""
    path = Path(loaded.name).expanduser()
    return path.resolve().name if path.is_dir() else loaded.name


def scope(options: BenchmarkOptions, prompts: Prompts, encoded: Sequence[Tensor]) -> dict[str, Any]:
    """What was decoded, for JSON; `encoded`: the (1, length) prompts whose numbers are reported."""
    lengths = sorted(prompt.shape[1] for prompt in encoded)
    return {
        "prompts": prompts.source,
        "prompts_fingerprint": fingerprint(encoded),
        "num_prompts": len(encoded),
        "prompt_lengths": {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1]},
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "seed": options.seed,
        "timeout": options.timeout,
        "sampling": {"temperature": TEMPERATURE, "top_p": TOP_P} if options.sampled else None,
    }


def show(result: dict[str, Any], mode: str, terminal: Terminal, verbose: bool = False) -> None:
    """The tables of one mode, and a line for each output that differs."""
    found = result["conditions"]
    title = (
        f"{result['model']}, {mode}: {found['num_prompts']} prompts ({found['prompts']}) of at most "
        f"{found['prompt_lengths']['most']} tokens, {found['max_new_tokens']} new tokens, {found['repeats']} repeats"
    )
    records = result[mode]
    terminal.table(title, report.COLUMNS, [report.row(record) for record in records], describe(found))
    for name, columns, rows, note in report.tables(records, verbose):
        terminal.table(f"{name}, {mode}", columns, rows, f"{note} {describe(found)}")
    for record in records:
        if record["arm"] == "compiled" and record.get("warm_up_excess_seconds"):
            print(f"compiled: {record['warm_up_excess_seconds']:.1f} s of compiling before, counted nowhere here")
    for line in (line for record in records for line in report.explain(record)):
        print(line)


def write(result: dict[str, Any], options: BenchmarkOptions, terminal: Terminal) -> None:
    """The record as the last line of standard output, and in a file and as a page if asked for."""
    result["process_peak_bytes"] = process_peak_bytes()
    if options.html is not None:
        from infer.benchmarking.page import benchmark_page  # here: matplotlib takes a second

        options.html.write_text(benchmark_page(result), encoding="utf-8")
        terminal.note(f"wrote {options.html}")
    write_record(result, options.json)
