"""The README's measured results, by one command.

    python scripts/results.py runs/quickstart [--untrained MODEL] [--adapted RUN]
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.results_page import arms, batches, budget, conditions

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


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
        *("adapted", "SmolLM2-135M-Instruct in its domain, a frozen target with two blocks, greedy", "adapted"),
        "--arms loop,chain,auto,lookup,hybrid --exit-layers 1 --num-draft-tokens 3 --repeats 1 --num-prompts 12",
    ),
    Table(
        *("whole-head", "The same with the whole head of 49,152 tokens instead of the draft vocabulary", "adapted"),
        "--arms chain,hybrid --no-draft-vocabulary --exit-layers 1 --num-draft-tokens 3 --repeats 1 --num-prompts 12",
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


def page(options: argparse.Namespace) -> str:
    """All tables that have a record, in Markdown."""
    parts: list[str] = []
    shown = [(table, lambda found, mode=table.mode: arms(found[mode])) for table in TABLES]
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
