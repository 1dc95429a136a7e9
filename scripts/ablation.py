"""Which part of the recipe does what: the same model, text and number of tokens under several recipes and seeds.

    python scripts/ablation.py [--steps 200] [--seeds 0 1 2] [--arms NAME ...] [--output runs/ablation] [--table]

Each run is `python -m train configs/quickstart.yaml` with other settings, in a folder of its own; a run that is
finished is not repeated, so the script may be stopped and started at will. `--table` prints what there is so far.
Then the exits of each model decode: `python -m infer benchmark` at the best exit and draft length of its forecast.

Frozen targets have no budget of their own: adapters train on the finished model of `plain`, for as many tokens again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN_TEXT_OFF = "data.own_text=0"
PAPER = [OWN_TEXT_OFF, "recipe.preset=paper-scratch"]
SELF_DISTILL = [OWN_TEXT_OFF, "recipe.preset=self-distill"]
BLOCKS = [f"recipe.{choice}" for choice in ("exits=[1]", "adapter_blocks=2", "exit_weights=uniform", "curriculum=all")]
BLOCKS += ["recipe.exit_loss_positions=1"]
TWO_EXITS = ["recipe.exits=[2,3]", "recipe.exit_weights=shallow"]

ARMS: dict[str, list[str]] = {
    "plain": [OWN_TEXT_OFF, "recipe.exit_loss_scale=0", "recipe.exit_weights=uniform", "recipe.max_dropout=0"],
    "paper recipe": PAPER,
    "paper + self-distillation": [*PAPER, "recipe.self_distillation=0.5"],
    "paper + shallow focus": [*SELF_DISTILL, "recipe.self_distillation=0", "recipe.exit_loss_positions=1"],
    "self-distill": SELF_DISTILL,  # Recipe's defaults
    "self-distill, no dropout": [*SELF_DISTILL, "recipe.max_dropout=0"],
    "self-distill, dropout 0.5 linear": [*SELF_DISTILL, "recipe.max_dropout=0.5", "recipe.dropout_depth=linear"],
    "self-distill, all positions": [*SELF_DISTILL, "recipe.exit_loss_positions=1"],
    "self-distill, own text at the end": [*SELF_DISTILL, "data.own_text=0.3"],
    "dont-drop-dropout": [OWN_TEXT_OFF, "recipe.preset=dont-drop-dropout", "recipe.exits=[2,3]"],
    "two blocks behind layer 0": [*SELF_DISTILL, *BLOCKS],
    "frozen target": [OWN_TEXT_OFF, "recipe.preset=frozen-target"],
    "frozen target, low-rank": [OWN_TEXT_OFF, "recipe.preset=frozen-target", "recipe.adapter_rank=128", *TWO_EXITS],
}


def folder(output: Path, arm: str, seed: int) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in arm.lower()).strip("-")
    return output / f"{name}-{seed}"


def train(output: Path, arm: str, seed: int, options: argparse.Namespace) -> None:
    """Run one arm unless it is finished."""
    run = folder(output, arm, seed)
    if result(run) is not None:
        return
    start = []
    if arm.startswith("frozen target"):
        plain = folder(output, "plain", seed)
        start = [f"model.name_or_path={plain}", "model.architecture=null", "tokenizer.train_vocab_size=null"]
        start += ["optim.learning_rate=1e-3"]
    settings = [
        *(f"run.output_dir={run}", f"run.seed={seed}", f"optim.max_steps={options.steps}"),
        *(f"optim.warmup_steps={options.steps // 12}", "every.evaluate=100000", f"every.save={options.steps}"),
        *(f"data.sequence_length={options.length}", "every.log=20", f"run.cpu_threads={options.threads}"),
        *("every.keep=1", *ARMS[arm], *start),
    ]
    config = recipe_left_out(output)
    command = [sys.executable, "-m", "train", str(config), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    run.parent.mkdir(parents=True, exist_ok=True)
    with (run.parent / f"{run.name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)


def recipe_left_out(output: Path) -> Path:
    """configs/quickstart.yaml without its recipe, so that each arm's is whole."""
    text = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    start = text.index("recipe:")
    stop = text.index("\n\n", start)
    path = output / "quickstart.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[:start] + text[stop:].lstrip("\n"), encoding="utf-8")
    return path


def measure(run: Path, options: argparse.Namespace) -> None:
    """Decode test prompts with the exit and length of the run's forecast; the result goes beside the run."""
    record = result(run)
    if record is None or not record.get("setting") or (run / "benchmark.json").is_file():
        return
    setting = record["setting"]
    command = [
        *(sys.executable, "-m", "infer", "benchmark", str(run), "--json", str(run / "benchmark.json")),
        *("--exit-layers", str(setting["exit_layer"]), "--num-draft-tokens", str(setting["num_draft_tokens"])),
        *("--threads", str(options.threads), "--num-prompts", "6", "--repeats", "1", "--max-new-tokens", "64"),
        "--sampled",
    ]
    with (run.parent / f"{run.name}-benchmark.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, check=False, stdout=log, stderr=subprocess.STDOUT)


def result(run: Path) -> dict[str, Any] | None:
    """evaluation.json of a finished run."""
    path = run / "evaluation.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record if "after" in record else None


def best_exit(record: dict[str, Any]) -> dict[str, float]:
    """Numbers on test text of the exit whose greedy forecast is fastest."""
    exits = record["after"]["test"]["exits"]
    speeds = {e: numbers["forecast"]["greedy"]["speedup"] for e, numbers in exits.items()}
    name = max(speeds, key=lambda e: speeds[e])
    return {"exit": int(name), "speedup": speeds[name], **exits[name]}


def rows(output: Path, seeds: list[int]) -> Iterator[list[str]]:
    for arm in ARMS:
        found = [(folder(output, arm, s), record) for s in seeds if (record := result(folder(output, arm, s)))]
        if not found:
            continue
        bests = [best_exit(record) for _, record in found]
        columns = [[record["after"]["test"]["last"]["loss"] for _, record in found]]
        columns += [[b[name] for b in bests] for name in ("agreement", "overlap", "speedup")]
        measured = [
            json.loads((run / "benchmark.json").read_text()) for run, _ in found if (run / "benchmark.json").is_file()
        ]
        columns += [[speedup(m, kind) for m in measured] for kind in ("greedy", "sampled")]
        exits = "/".join(str(e) for e in sorted({int(b["exit"]) for b in bests}))
        yield [arm, str(len(found)), exits, *(mean(values) for values in columns)]


def speedup(record: dict[str, Any], mode: str) -> float:
    """Of self-speculative decoding over `generate`, from a benchmark's record."""
    return float(next(arm["speedup"] for arm in record[mode] if arm["arm"] == "self-speculative"))


def mean(values: list[float]) -> str:
    """Mean and, of several, half the spread."""
    if not values:
        return "-"
    spread = f" ±{(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


COLUMNS = ("recipe", "seeds", "best exit", "last-layer loss", "agreement (T=0)", "1 - TV (T=1)", "predicted speedup")


def print_table(output: Path, seeds: list[int]) -> None:
    """The table so far, in Markdown: means over seeds, ± half the spread; test text throughout."""
    columns = (*COLUMNS, "measured, greedy", "measured, sampled")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows(output, seeds):
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run (default %(default)s)")
    parser.add_argument("--length", type=int, default=192, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a run (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "ablation")
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args()
    if not options.table:
        with ThreadPoolExecutor(options.jobs) as pool:  # each thread waits for a process
            for seed in options.seeds:
                list(pool.map(lambda arm, s=seed: train(options.output, arm, s, options), options.arms))
                print_table(options.output, options.seeds)
        for seed in options.seeds:  # alone: side by side they would disturb each other's clocks
            for arm in options.arms:
                measure(folder(options.output, arm, seed), options)
    print_table(options.output, options.seeds)


if __name__ == "__main__":
    main()
