"""What `forecast_grid.py` measured, beside what was forecast: numbers cell by cell, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from layerskip.forecast import tree_name

if TYPE_CHECKING:
    from infer.terminal import Terminal
    from infer.tuning.evidence import Evidence
    from layerskip.checkpoint.settings import Setting
    from layerskip.forecast import ExitMeasurement, Forecast


@dataclass
class Cell:
    """A setting, and what decoding with it took: seconds and tokens of all rounds but the first."""

    setting: Setting
    forecast: Forecast | None = None
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0


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
