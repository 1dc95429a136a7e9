"""What `tune` found: tables for people, a record for machines, a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import report
from infer.conditions import describe
from infer.terminal import Terminal

if TYPE_CHECKING:
    from infer.tuning import Evidence
    from layerskip.costs import Costs
    from layerskip.settings import Setting

COLUMNS = ("rank", "exit", "drafts", "head", "agreement", "1 - TV", "accepted", "forecast")
_SHOWN = 8  # best settings in the table, and the best of every exit besides


def record(
    name: str,
    conditions: dict[str, Any],
    evidence: "Evidence",
    confirmed: Sequence[dict[str, Any]],
    setting: "Setting",
    reason: str,
) -> dict[str, Any]:
    """For JSON: what was measured, every forecast, best first, what was confirmed, and the choice."""
    exits = []
    for exit_layer in sorted(evidence.measured)[:-1]:  # the last one is the model itself
        whole = evidence.measured[exit_layer]
        heads = [("whole", whole), *([("cut", whole.cut)] if whole.cut is not None else [])]
        for head, measured in heads:
            lengths = [
                _rounded(measured.mean_acceptance_length(n, conditions["temperature"] > 0))
                for n in sorted({forecast.num_draft_tokens for forecast in evidence.forecasts})
            ]
            numbers = {"agreement": measured.agreement, "overlap": measured.overlap}
            exits.append(
                {"exit_layer": exit_layer, "head": head}
                | {key: _rounded(value) for key, value in numbers.items()}
                | {"mean_acceptance_length": lengths, "num_tokens": measured.num_tokens}
            )
    forecasts = [
        {
            "exit_layer": forecast.exit_layer,
            "num_draft_tokens": forecast.num_draft_tokens,
            "head": "cut" if evidence.has_vocabulary and forecast.draft_vocabulary else "whole",
            "mean_acceptance_length": _rounded(forecast.mean_acceptance_length),
            "speedup": _rounded(forecast.speedup),
        }
        for forecast in evidence.forecasts
    ]
    return {
        "model": name,
        "conditions": conditions,
        "exits": exits,
        "milliseconds": milliseconds(evidence.costs),
        "forecasts": forecasts,
        "confirmation": list(confirmed),
        "setting": {"exit_layer": setting.exit_layer, "num_draft_tokens": setting.num_draft_tokens}
        | {"draft_vocabulary": setting.draft_vocabulary},
        "off": setting.exit_layer is None,
        "reason": reason,
    }


def milliseconds(costs: "Costs") -> dict[str, Any]:
    """The costs as they go into JSON."""

    def scaled(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): scaled(each) for key, each in value.items()}
        return round(value * 1000, 4)

    return {name: scaled(value) for name, value in asdict(costs).items()}


def show(result: dict[str, Any], terminal: Terminal) -> None:
    """The tables, and the choice in a line."""
    scope = result["conditions"]
    way = f"temperature {scope['temperature']:g}" if scope["temperature"] else "greedy"
    title = (
        f"{result['model']}, {way}: forecasts from {scope['num_prompts']} prompts ({scope['prompts']}) and "
        f"{scope['max_new_tokens']} new tokens each, best first"
    )
    costs = result["milliseconds"]
    caption = (
        f"agreement: greedy; 1 - TV: chance that a sampled token is accepted, at temperature "
        f"{scope['temperature'] or 1:g}; accepted: tokens a verify step. A plain step takes "
        f"{costs['plain']:.1f} ms, the loop adds {costs['bookkeeping']['plain']:.2f} ms to it, and "
        f"{costs['bookkeeping']['round']:.2f} ms + {costs['bookkeeping']['draft']:.2f} ms a draft to a round. "
        f"{describe(scope)}"
    )
    terminal.table(title, COLUMNS, rows(result), caption)
    if result["confirmation"]:
        title = f"measured on {scope['num_confirmed']} other prompts, interleaved"
        terminal.table(title, report.COLUMNS, [report.row(each) for each in result["confirmation"]])
        for line in (line for each in result["confirmation"] for line in report.explain(each)):
            print(line)
    chosen = result["setting"]
    head = "" if chosen["draft_vocabulary"] else ", whole head"
    what = f"exit layer {chosen['exit_layer']}, {chosen['num_draft_tokens']} drafted tokens{head}"
    print(f"choice: {'off (plain decoding)' if result['off'] else what}: {result['reason']}")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The best settings, and of every exit layer its best."""
    by_exit = {(each["exit_layer"], each["head"]): each for each in result["exits"]}
    shown, seen = [], set()
    for place, forecast in enumerate(result["forecasts"], start=1):
        key = forecast["exit_layer"], forecast["head"]
        if place > _SHOWN and key in seen:
            continue
        seen.add(key)
        measured = by_exit[key]
        shown.append(
            [
                str(place),
                str(forecast["exit_layer"]),
                str(forecast["num_draft_tokens"]),
                forecast["head"],
                f"{measured['agreement']:.2f}",
                f"{measured['overlap']:.2f}",
                f"{forecast['mean_acceptance_length']:.2f}",
                f"{forecast['speedup']:.2f}x",
            ]
        )
    return shown


def draw(result: dict[str, Any], path: Path) -> None:
    """A heat map of the forecasts, exits down and drafts across; of two heads, the better one's."""
    from matplotlib.figure import Figure

    best: dict[tuple[int, int], float] = {}
    for forecast in reversed(result["forecasts"]):
        best[forecast["exit_layer"], forecast["num_draft_tokens"]] = forecast["speedup"]
    exits, drafts = (sorted({pair[axis] for pair in best}) for axis in (0, 1))
    grid = [[best.get((e, n), math.nan) for n in drafts] for e in exits]
    figure = Figure(figsize=(1.8 + 0.65 * len(drafts), 1.8 + 0.4 * len(exits)), layout="constrained")
    axes = figure.add_subplot()
    # White is no gain: red loses, blue gains.
    span = max(abs(value - 1) for value in best.values()) or 1.0
    image = axes.imshow(grid, cmap="RdBu", vmin=1 - span, vmax=1 + span, aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            if not math.isnan(value):
                dark = abs(value - 1) > 0.6 * span
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(drafts)), [str(n) for n in drafts])
    axes.set_yticks(range(len(exits)), [str(e) for e in exits])
    axes.set_xlabel("drafted tokens a step")
    axes.set_ylabel("exit layer")
    axes.set_title(f"{result['model']}: forecast speedup")
    figure.colorbar(image, ax=axes, label="over plain decoding")
    figure.savefig(path, dpi=150)


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
