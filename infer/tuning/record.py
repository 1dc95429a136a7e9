"""What `tune` found, as a record for machines."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infer.tuning.evidence import Evidence
from layerskip.checkpoint.settings import Setting
from layerskip.forecast import Costs, Forecast


def record(
    name: str,
    conditions: dict[str, Any],
    evidence: Evidence,
    confirmed: Sequence[dict[str, Any]],
    setting: Setting,
    reason: str,
) -> dict[str, Any]:
    """For JSON: what was measured, every forecast, best first, what was confirmed, and the choice."""
    return {
        "model": name,
        "conditions": conditions,
        "exits": _exits(evidence, sampled=conditions["temperature"] > 0),
        "milliseconds": milliseconds(evidence.costs),
        "forecasts": [_forecast(each, evidence.has_vocabulary) for each in evidence.forecasts],
        "confirmation": list(confirmed),
        "setting": {"exit_layer": setting.exit_layer, "num_draft_tokens": setting.num_draft_tokens}
        | {"tree": setting.tree, "draft_vocabulary": setting.draft_vocabulary},
        "off": setting.exit_layer is None,
        "reason": reason,
    }


def _exits(evidence: Evidence, sampled: bool) -> list[dict[str, Any]]:
    """What was measured of every exit, with the whole head and a cut one; the last one is the model itself."""
    lengths = sorted({each.num_draft_tokens for each in evidence.forecasts if each.tree is None})
    found = []
    for exit_layer in sorted(evidence.measured)[:-1]:
        whole = evidence.measured[exit_layer]
        heads = [("whole", whole), *([("cut", whole.cut)] if whole.cut is not None else [])]
        for head, measured in heads:
            found.append(
                {
                    "exit_layer": exit_layer,
                    "head": head,
                    "agreement": _rounded(measured.agreement),
                    "overlap": _rounded(measured.overlap),
                    "mean_acceptance_length": [_rounded(measured.mean_acceptance_length(n, sampled)) for n in lengths],
                    "num_tokens": measured.num_tokens,
                }
            )
    return found


def _forecast(forecast: Forecast, has_vocabulary: bool) -> dict[str, Any]:
    return {
        "exit_layer": forecast.exit_layer,
        "num_draft_tokens": forecast.num_draft_tokens,
        "tree": forecast.tree,
        "head": "cut" if has_vocabulary and forecast.draft_vocabulary else "whole",
        "mean_acceptance_length": _rounded(forecast.mean_acceptance_length),
        "speedup": _rounded(forecast.speedup),
        "interval": None if forecast.interval is None else [_rounded(end) for end in forecast.interval],
    }


def milliseconds(costs: Costs) -> dict[str, Any]:
    """The costs as they go into JSON."""

    def scaled(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): scaled(each) for key, each in value.items()}
        return round(value * 1000, 4)

    return {name: scaled(value) for name, value in asdict(costs).items()}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
