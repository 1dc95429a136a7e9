"""The README's measured results, by one command.

    python scripts/results.py runs/quickstart [--untrained MODEL] [--adapted RUN --adapted-prompts FILE]
                              [--records runs/results] [--only NAME ...] [--print]

Each table is one `python -m infer benchmark`, whose record is kept in the folder of records; a table that has its
record is not measured again, so the script may be stopped and started at will. Then what stands in the README between
`<!-- results -->` and `<!-- end of results -->` is written anew (`--print`: only shown). Rows where speculation loses
stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
COLUMNS = (
    *("", "exit / drafts", "× plain `generate`", "spread", "by processor time"),
    *("tokens a round", "accepted", "equal"),
)


@dataclass(frozen=True)
class Table:
    """One benchmark.

    Attributes:
        name: of its record.
        title: what it is about.
        model: key of the model it decodes: "run", "untrained" or "adapted".
        flags: of `infer benchmark`.
        mode: "greedy" or "sampled": which part of the record is shown.
        source: name of the table whose record it shows; its own if empty.
    """

    name: str
    title: str
    model: str
    flags: str = ""
    mode: str = "greedy"
    source: str = ""


TABLES = (
    Table(
        *("code", "The quickstart's model on the standard library's code, greedy", "run"),
        "--arms compiled,loop,chain,auto,tree,lookup,hybrid,branch,early-exit,transformers-lookup --repeats 2",
    ),
    Table(
        *("sampled", "The same, sampled: temperature 0.8, top-p 0.95", "run"),
        "--arms loop,chain,auto,block,coupled,early-exit --sampled --repeats 2",
        mode="sampled",
    ),
    Table(
        *("untrained", "SmolLM2-135M-Instruct as it is: nobody trained its exits, so drafting loses", "untrained"),
        "--arms loop,chain,auto,lookup,early-exit --exit-layers 3 --num-draft-tokens 2 --repeats 1 --num-prompts 4",
    ),
    Table(
        *("adapted", "SmolLM2-135M-Instruct adapted to one domain, greedy", "adapted"),
        "--arms loop,chain,auto,lookup,hybrid,early-exit --exit-layers 3 --num-draft-tokens 2 --repeats 1",
    ),
)
BATCHES = Table("batches", "Batches of unequal prompts", "run", "--batch-sizes 1,2,4,8,16 --arms loop,chain,hybrid")
BUDGET = Table("budget", "Chains against trees of as many verified tokens", "run", "--equal-budget --repeats 1")


def command(table: Table, options: argparse.Namespace) -> list[str] | None:
    """The benchmark that makes a table; None where its model was not named."""
    model = getattr(options, table.model)
    if model is None:
        return None
    size = ["--num-prompts", "6"] if "--num-prompts" not in table.flags else []
    tuned = ["--exit-layers", "2", "--num-draft-tokens", "4"] if table.model == "run" else []
    if table is BUDGET:
        tuned = ["--exit-layers", "2", "--num-draft-tokens", "4,6"]
    return [
        *("benchmark", str(model), *table.flags.split(), *size, *tuned),
        *("--max-new-tokens", str(options.max_new_tokens), "--threads", "1", "--dtype", options.dtype),
    ]


def record(table: Table, options: argparse.Namespace) -> dict[str, Any] | None:
    """The table's record, measured now if it is not there; None where it cannot be."""
    path: Path = options.records / f"{table.source or table.name}.json"
    asked = command(table, options)
    if not path.is_file() and asked is not None and (not options.only or table.name in options.only):
        path.parent.mkdir(parents=True, exist_ok=True)
        print("python -m infer", *asked, file=sys.stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "infer", *asked, "--json", str(path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            print(f"{table.name}: exit code {done.returncode}, left out", file=sys.stderr)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def arms(table: Table, found: dict[str, Any]) -> list[str]:
    """Of a record, the rows of `COLUMNS`."""
    rows = []
    for arm in found[table.mode]:
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
    versions = f"torch {c['torch'].split('+')[0]}, transformers {c['transformers']}, commit {c['commit'][:9]}"
    model = f"{c['dtype']}, {c['attention']} attention"
    return f"{machine}; {model}; {versions}; {lengths}; {c['repeats']} repeats; {c['date'][:10]}."


def header(columns: tuple[str, ...]) -> tuple[str, str]:
    return line(*columns), "|" + "---|" * len(columns)


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def page(options: argparse.Namespace) -> str:
    """All tables that have a record, in Markdown."""
    parts: list[str] = []
    shown = [(table, lambda found, table=table: arms(table, found)) for table in TABLES]
    for table, rows in [*shown, (BATCHES, batches), (BUDGET, budget)]:
        found = record(table, options)
        if found is not None:
            flags = " ".join((command(table, options) or ["benchmark", "MODEL", *table.flags.split()])[2:])
            parts += [f"**{table.title}** (`benchmark MODEL {flags}`)", "", *rows(found), "", conditions(found), ""]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of configs/quickstart.yaml")
    parser.add_argument("--untrained", type=Path, help="a model that nobody trained to draft (scripts/smollm2.py)")
    parser.add_argument("--adapted", type=Path, help="a run of configs/smollm2-domain.yaml")
    parser.add_argument("--records", type=Path, default=ROOT / "runs" / "results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these of the missing records")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--print", action="store_true", dest="show", help="show the tables, leave the README alone")
    options = parser.parse_args()
    text = page(options)
    if options.show:
        print(text)
        return
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"README.md has no {BEGIN} ... {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
