"""What a recipe adds to a training step: time and peak memory against the plain step, measured in one run.

    python scripts/recipe_cost.py [--threads 2] [--rows 4] [--length 512] [--repeats 3] [--clock wall|cpu]

A step is forward, backward and AdamW of a model with the shape of SmolLM2-135M (random weights; only shapes matter)
on random tokens: float32 weights, under bfloat16 autocast where the CPU has bfloat16. Times: arms interleaved, the
median of the repeats. Memory: the peak of a process that does one step of one arm, model and optimizer included.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaForCausalLM

from layerskip.model.machine import fast_dtype
from layerskip.training.recipe import Recipe, prepare
from scripts.shapes import smollm2_135m

ONE_EXIT = Recipe(
    max_dropout=0, exits=(3,), exit_weights="uniform", exit_loss_scale=0.5, exit_loss_positions=1, curriculum="all"
)
ARMS: dict[str, Recipe | None] = {
    "plain": None,
    "paper-continual (4 exits a step)": Recipe.preset("paper-continual"),
    "one exit, all positions": ONE_EXIT,
    "one exit, 1/2 of the positions": replace(ONE_EXIT, exit_loss_positions=1 / 2),
    "one exit, 1/4 of the positions": replace(ONE_EXIT, exit_loss_positions=1 / 4),
    "one exit, 1/8 of the positions": replace(ONE_EXIT, exit_loss_positions=1 / 8),
    "default": Recipe(),
    "default, p_max 0.5 linear": Recipe(max_dropout=0.5, dropout_depth="linear"),
    "frozen-target": Recipe.preset("frozen-target"),
}
FIVE_EXITS = replace(ONE_EXIT, exits=(2, 3, 4, 6, 8), exit_loss_scale=0.2)


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(smollm2_135m()).train()


def training_step(model: LlamaForCausalLM, recipe: Recipe | None, ids: torch.Tensor) -> Callable[[int], None]:
    """A function that does optimizer step `i` of one arm on the shared model."""

    def run(i: int) -> None:
        model.requires_grad_(True)
        handle = prepare(model, recipe) if recipe else None
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
        if handle:
            handle.set_step(i)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_dtype() == torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if handle:
            handle.remove()
            model._modules.pop("layerskip_adapters", None)

    return run


def times(ids: torch.Tensor, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of a step of every arm, interleaved, after a round to warm up."""
    model = build_model()
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for i in range(repeats + 1):
        for name, recipe in ARMS.items():
            step = training_step(model, recipe, ids)
            start = clock()
            step(i)
            seconds[name].append(clock() - start)
            print(f"\rround {i} of {repeats}: {name:<40}", end="", file=sys.stderr)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def peak_memory(arm: str, rows: int, length: int) -> float:
    """MiB at the peak of a fresh process that does one step."""
    command = [sys.executable, __file__, "--peak", arm, "--rows", str(rows), "--length", str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step (default %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each arm (default %(default)s)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a busy machine")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ids = torch.randint(0, 49152, (arguments.rows, arguments.length), generator=torch.Generator().manual_seed(0))
    if arguments.peak:
        training_step(build_model(), {"plain": None, "five exits": FIVE_EXITS}[arguments.peak], ids)(0)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    measured = times(ids, arguments.repeats, clock)
    print(
        f"{arguments.rows} x {arguments.length} tokens, {arguments.threads} threads, {fast_dtype()}, "
        f"{arguments.clock} time\n"
    )
    print("| recipe | step, s | against plain |\n|---|---|---|")
    for name, seconds in measured.items():
        print(f"| {name} | {seconds:.2f} | {seconds / measured['plain']:.2f}x |")
    if not arguments.no_memory:
        plain, five = (peak_memory(arm, arguments.rows, arguments.length) for arm in ("plain", "five exits"))
        print(f"\npeak memory: plain {plain:.0f} MiB, five exits at all positions {five:.0f} MiB, {five / plain:.2f}x")


if __name__ == "__main__":
    main()
