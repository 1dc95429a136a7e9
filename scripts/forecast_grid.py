"""How good the forecasts of `python -m infer tune` are: every cell of the grid is decoded, and compared with its own.

    python scripts/forecast_grid.py MODEL [--exits 1,2,3] [--lengths 1,2,4] [--tree s4_k2_d6] [--threads 1]

Forecasts come from validation prompts, as in `tune`; then plain decoding and all cells decode test prompts, in turn, in
the same process. Times are the decoding thread's processor time on a CPU, so take --threads 1: wall time also counts
whatever else the machine does. They begin after the prompt's first round, since prompts cost all cells the same, and
leave out a last round that the end cut short. Speed-ups are over this kit's own loop without drafts, as forecasts are.

Printed besides: what the forecast would be with the acceptance that was measured (so what is left is the costs'), the
acceptance of the same prompts teacher-forced (so what is left are other prompts), tune's regret (what its choice loses
against the best cell measured), and the share of the ideal that was reached: layers and head alone, nothing else.
One line of JSON ends the output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from torch import Tensor

    from infer.loading import Loaded
    from infer.terminal import Terminal
    from infer.tune import TuneOptions
    from infer.tuning.evidence import Evidence
    from layerskip.checkpoint.settings import Setting
    from layerskip.forecast import ExitMeasurement, Forecast

_PLAIN_EVERY = 8  # cells between two runs of plain decoding, which all are compared with


@dataclass
class Cell:
    """A setting, and what decoding with it took: seconds and tokens of all rounds but the first."""

    setting: Setting
    forecast: Forecast | None = None
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Forecast, decode, compare, show; returns what is printed as JSON."""
    options = read_arguments(argv)

    from infer.benchmarking.output import name_of
    from infer.benchmarking.questions import encode
    from infer.conditions import conditions
    from infer.loading import load
    from infer.options import ModelOptions
    from infer.prompts import find_prompts
    from infer.source import local_folder
    from infer.terminal import Terminal
    from infer.tune import TuneOptions
    from infer.tuning.evidence import continuations, look, measure_texts, trees_of

    terminal, exits = Terminal(), tuple(options.exits or ())
    tuning = TuneOptions(
        exit_layers=exits or None,
        max_draft_tokens=max(options.lengths),
        trees=tuple(options.tree),
        num_prompts=options.num_prompts,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
    )
    loaded = load(ModelOptions(options.model, options.dtype, None, options.threads), exits)
    prompts = find_prompts(options.prompts, local_folder(options.model), need_validation=True)
    validation, test = (encode(loaded, texts, tuning) for texts in (prompts.validation, prompts.test))
    start = perf_counter()
    evidence = look(loaded, tuning, validation, terminal)
    seconds = perf_counter() - start
    test, cells = test[: options.num_measured], cells_of(evidence, options.lengths)
    plain = measure(loaded, tuning, cells, test, terminal)
    texts = continuations(loaded, tuning, test)
    same = measure_texts(loaded, tuning, [*evidence.costs.draft], trees_of(loaded, tuning), texts)
    result = {"model": name_of(loaded), "seconds_to_forecast": round(seconds, 1)}
    result |= compare(evidence, same, cells, plain, options.temperature > 0)
    counts = {"num_prompts": len(validation), "num_measured": len(test), "max_new_tokens": options.max_new_tokens}
    result["conditions"] = conditions(loaded.model) | counts | {"temperature": options.temperature}
    show(result, terminal)
    print(json.dumps(result, allow_nan=False))
    return result


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    from infer.speculation import tree

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL", help="local folder or Hub id")
    add("--exits", type=numbers, metavar="E,...", help="exit layers (default: as tune)")
    add("--lengths", type=numbers, default=[1, 2, 3, 4, 6, 8], metavar="K,...", help="drafted tokens of chains")
    add("--tree", type=tree, action="append", default=[], metavar="SHAPE", help="a tree besides; may be given again")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads (default %(default)s)")
    add("--dtype", default="auto", help="of the weights and the arithmetic (default: the checkpoint's)")
    add("--prompts", metavar="FILE", help="JSON lines; every other one is measured (default: as tune)")
    add("--num-prompts", type=int, default=12, metavar="N", help="prompts to forecast with (default %(default)s)")
    add("--num-measured", type=int, default=6, metavar="N", help="test prompts that are decoded (default %(default)s)")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="tokens of each output (default %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return sorted({int(part) for part in text.split(",")})


def cells_of(evidence: Evidence, lengths: Sequence[int]) -> list[Cell]:
    """A cell for every forecast of these chains and of the trees."""
    from infer.tuning.run import setting_of

    chosen = [f for f in evidence.forecasts if f.tree is not None or f.num_draft_tokens in lengths]
    order = sorted(chosen, key=lambda f: (f.exit_layer, f.draft_vocabulary, f.tree is not None, f.num_draft_tokens))
    return [Cell(setting_of(forecast), forecast) for forecast in order]


def measure(
    loaded: Loaded, tuning: TuneOptions, cells: Sequence[Cell], prompts: Sequence[Tensor], terminal: Terminal
) -> Cell:
    """Decode all prompts with all cells, and plainly in between; returns the plain cell."""
    from layerskip.checkpoint.settings import Setting

    plain, warm = Cell(Setting(None, 0)), [Cell(cell.setting) for cell in cells]
    for cell in (Cell(plain.setting), *warm):
        decode(loaded, tuning, cell, prompts[0], 16)
    with terminal.progress(len(prompts) * len(cells)) as advance:
        for number, prompt in enumerate(prompts):
            turn = number * len(cells) // len(prompts)  # who goes first changes
            for place, cell in enumerate([*cells[turn:], *cells[:turn]]):
                if place % _PLAIN_EVERY == 0:
                    decode(loaded, tuning, plain, prompt, tuning.max_new_tokens)
                decode(loaded, tuning, cell, prompt, tuning.max_new_tokens)
                advance(f"prompt {number + 1}")
    return plain


def decode(loaded: Loaded, tuning: TuneOptions, cell: Cell, prompt: Tensor, max_new_tokens: int) -> None:
    """Decode a (1, length) prompt; count all rounds but the first, and the last where it was cut short."""
    import torch

    import layerskip

    arguments = {**tuning.decoding().generate_arguments(), "max_new_tokens": max_new_tokens}
    clock = thread_time if prompt.device.type == "cpu" else perf_counter
    steps = layerskip.steps(
        loaded.model, prompt, attention_mask=torch.ones_like(prompt), **arguments, **vars(cell.setting)
    )
    full = next(steps).num_levels
    start = clock()
    for step in steps:
        seconds = clock() - start
        if step.num_levels == full:
            cell.seconds, cell.rounds = cell.seconds + seconds, cell.rounds + 1
            cell.tokens += step.tokens.numel()
        start = clock()


def compare(
    evidence: Evidence, same: dict[int, ExitMeasurement], cells: Sequence[Cell], plain: Cell, sampled: bool
) -> dict[str, Any]:
    """The grid, cell by cell, and what it says of the forecasts."""
    rows = [_row(evidence, same, cell, plain, sampled) for cell in cells]
    speeds = {"plain": 1.0} | {row["drafts"]: row["measured"] for row in rows}
    best = max([1.0, *(row["measured"] for row in rows)])
    chosen = max(rows, key=lambda row: row["forecast"])
    reached = chosen["measured"] if chosen["forecast"] > 1 else 1.0
    errors = {name: [abs(row[name]) for row in rows] for name in ("error", "acceptance_error", "round_error")}
    inside = [row["low"] <= row["measured"] <= row["high"] for row in rows if row["low"] is not None]
    return {
        "cells": rows,
        "plain_milliseconds": round(1000 * plain.seconds / plain.tokens, 3),
        "plain_milliseconds_forecast": round(1000 * evidence.costs.step, 3),
        **{f"median_{name}": round(median(values), 4) for name, values in errors.items()},
        "inside_interval": f"{sum(inside)} of {len(inside)}",
        "best": max(speeds, key=lambda name: speeds[name]),
        "chosen": chosen["drafts"],
        "regret": round(1 - reached / best, 4),
        "of_the_ideal": chosen["of_the_ideal"],
        "median_of_the_ideal": round(median(row["of_the_ideal"] for row in rows), 4),
    }


def _row(
    evidence: Evidence, same: dict[int, ExitMeasurement], cell: Cell, plain: Cell, sampled: bool
) -> dict[str, Any]:
    from layerskip.forecast import tree_name

    forecast, costs = cell.forecast, evidence.costs
    assert forecast is not None
    draft, cut = forecast.tree or forecast.num_draft_tokens, evidence.has_vocabulary and forecast.draft_vocabulary
    measurement = same[forecast.exit_layer]
    expected = (measurement.cut if cut and measurement.cut else measurement).mean_acceptance_length(draft, sampled)
    length = cell.tokens / cell.rounds
    measured = (cell.tokens / cell.seconds) / (plain.tokens / plain.seconds)
    took = (cell.seconds / cell.rounds) / (plain.seconds / plain.tokens)  # plain steps
    ideal = length * costs.plain / costs.layers(forecast.exit_layer, draft, cut)
    low, high = forecast.interval or (None, None)
    name = f"{forecast.exit_layer}/{draft if isinstance(draft, int) else tree_name(draft)}" + (" cut" if cut else "")
    values = {
        "forecast": forecast.speedup,
        "low": low,
        "high": high,
        "measured": measured,
        "error": forecast.speedup / measured - 1,
        "accepted_forecast": forecast.mean_acceptance_length,
        "accepted_same_prompts": expected,
        "accepted": length,
        "acceptance_error": expected / length - 1,
        "round_forecast": costs.round(forecast.exit_layer, draft, cut) / costs.step,
        "round": took,
        "round_error": costs.round(forecast.exit_layer, draft, cut) / costs.step / took - 1,
        "of_the_ideal": measured / ideal,
    }
    return {"drafts": name} | {key: None if value is None else round(value, 4) for key, value in values.items()}


COLUMNS = (
    *("exit/drafts", "forecast", "9 in 10", "measured", "error", "accepted", "same prompts", "forecast"),
    *("round, in plain steps", "forecast", "of the ideal"),
)


def show(result: dict[str, Any], terminal: Terminal) -> None:
    """The table, and its sum."""
    rows = [
        [
            row["drafts"],
            f"{row['forecast']:.2f}x",
            "-" if row["low"] is None else f"{row['low']:.2f}-{row['high']:.2f}",
            f"{row['measured']:.2f}x",
            f"{row['error']:+.1%}",
            *(f"{row[name]:.2f}" for name in ("accepted", "accepted_same_prompts", "accepted_forecast")),
            *(f"{row[name]:.3f}" for name in ("round", "round_forecast")),
            f"{row['of_the_ideal']:.0%}",
        ]
        for row in result["cells"]
    ]
    terminal.table(f"{result['model']}: the grid", COLUMNS, rows)
    print(
        f"median error {result['median_error']:.1%} (acceptance, same prompts {result['median_acceptance_error']:.1%}; "
        f"rounds {result['median_round_error']:.1%}); {result['inside_interval']} inside the interval\n"
        f"tune's choice {result['chosen']}, best measured {result['best']}: regret {result['regret']:.1%}\n"
        f"of the ideal, layers and head alone: {result['of_the_ideal']:.0%} at the choice, "
        f"{result['median_of_the_ideal']:.0%} in the median; forecast made in {result['seconds_to_forecast']} s"
    )


if __name__ == "__main__":
    main()
