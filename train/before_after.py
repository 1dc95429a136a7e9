"""What the training did to every exit and to the last layer: rows of a table, from evaluation.json alone."""

from typing import Any

COLUMNS = ("layers run", "loss", "agreement", "overlap", "greedy forecast", "sampled forecast")
_WHEN = ("before", "after")


def rows(evaluation: dict[str, Any], split: str = "test") -> list[list[str]]:
    """One row an exit, the whole model last, cells as "before → after"; empty unless both are there."""
    before, after = (((evaluation.get(when) or {}).get(split)) or {} for when in _WHEN)
    if not before or not after:
        return []
    table = []
    for exit_layer in sorted(after["exits"], key=int):
        pair = before["exits"].get(exit_layer, {}), after["exits"][exit_layer]
        shares = [_pair(*(_number(numbers.get(name)) for numbers in pair)) for name in ("loss", "agreement", "overlap")]
        forecasts = [_pair(*(_speedup(numbers, way) for numbers in pair)) for way in ("greedy", "sampled")]
        table.append([exit_layer, *shares, *forecasts])
    losses = [_number(numbers["last"]["loss"]) for numbers in (before, after)]
    return [*table, ["all", _pair(*losses), "", "", "", ""]]


def last_layer(evaluation: dict[str, Any], split: str = "test") -> dict[str, float]:
    """The last layer's loss {"before", "after"} and "change", after ÷ before - 1; empty if not both are known."""
    losses = [((evaluation.get(when) or {}).get(split) or {}).get("last", {}).get("loss") for when in _WHEN]
    if None in losses:
        return {}
    return {"before": losses[0], "after": losses[1], "change": losses[1] / losses[0] - 1}


def _pair(before: str, after: str) -> str:
    return f"{before} → {after}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _speedup(numbers: dict[str, Any], way: str) -> str:
    forecast = (numbers.get("forecast") or {}).get(way)
    return f"{forecast['speedup']:.2f}x" if forecast else "-"
