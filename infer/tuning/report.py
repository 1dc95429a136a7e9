"""What `tune` found, for people: tables, the choice in a line, a picture."""

import math
from pathlib import Path
from typing import Any

from infer.benchmarking import report
from infer.conditions import describe
from infer.terminal import Terminal
from layerskip.forecast import tree_name

COLUMNS = ("rank", "exit", "drafts", "head", "agreement", "1 - TV", "accepted", "forecast", "9 in 10")
_SHOWN = 8  # best settings in the table, and the best of every exit besides


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
        f"{scope['temperature'] or 1:g}; accepted: tokens a verify step; 9 in 10: where the forecast would lie with "
        f"other such prompts (bootstrap; the machine's noise is not in it). A plain step takes "
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
        for each in result["confirmation"]:
            if each.get("ideal"):
                print(ideal_line(each))
    chosen = result["setting"]
    head = "" if chosen["draft_vocabulary"] else ", whole head"
    drafts = f"{chosen['num_draft_tokens']} drafted tokens"
    drafts = drafts if chosen["tree"] is None else f"trees {tree_name(chosen['tree'])}"
    what = f"exit layer {chosen['exit_layer']}, {drafts}{head}"
    print(f"choice: {'off (plain decoding)' if result['off'] else what}: {result['reason']}")


def ideal_line(record: dict[str, Any]) -> str:
    """How much of the ideal a confirmed setting reached, and where the rest went."""
    ideal = record["ideal"]
    passes = f"choosing tokens, masks and slower passes {ideal['passes']:.1%}"
    if ideal["passes"] < 0:
        passes = "and its passes were faster than when the stages were timed: a busy machine, or few prompts"
    return (
        f"{record['exit_layer']}/{record['drafts']}: {ideal['measured']:.2f}x without prompts, {ideal['share']:.0%} of "
        f"the ideal {ideal['ideal']:.2f}x (layers and head alone, at the {record['mean_acceptance_length']:.2f} tokens "
        f"accepted). Of its time: rule and rollback {ideal['rollback']:.1%}, between rounds {ideal['between']:.1%}, "
        f"{passes}"
    )


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
                drafts_of(forecast),
                forecast["head"],
                f"{measured['agreement']:.2f}",
                f"{measured['overlap']:.2f}",
                f"{forecast['mean_acceptance_length']:.2f}",
                f"{forecast['speedup']:.2f}x",
                "{:.2f}-{:.2f}".format(*forecast["interval"]) if forecast["interval"] else "-",
            ]
        )
    return shown


def drafts_of(forecast: dict[str, Any]) -> str:
    """What is drafted, for people: a number, or a tree."""
    tree = forecast["tree"]
    return str(forecast["num_draft_tokens"]) if tree is None else tree_name(tree)


def draw(result: dict[str, Any], path: Path) -> None:
    """A heat map of the forecasts, exits down, chains and then trees across; of two heads, the better one's."""
    from matplotlib.figure import Figure

    best: dict[tuple[int, str], float] = {}
    for forecast in reversed(result["forecasts"]):
        best[forecast["exit_layer"], drafts_of(forecast)] = forecast["speedup"]
    exits = sorted({exit_layer for exit_layer, _ in best})
    chains = sorted({f["num_draft_tokens"] for f in result["forecasts"] if f["tree"] is None})
    trees = list(dict.fromkeys(drafts_of(f) for f in result["forecasts"] if f["tree"] is not None))
    trees.sort(key=lambda name: (name.startswith("s"), len(name), name))
    drafts = [*map(str, chains), *trees]
    grid = [[best.get((e, n), math.nan) for n in drafts] for e in exits]
    size = (2.4 + 0.65 * len(chains) + 0.85 * len(trees), 2.0 + 0.45 * len(exits))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    # White is no gain: red loses, blue gains.
    span = max(abs(value - 1) for value in best.values()) or 1.0
    image = axes.imshow(grid, cmap="RdBu", vmin=1 - span, vmax=1 + span, aspect="auto")
    top = max(best.values())
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            if not math.isnan(value):
                dark, weight = abs(value - 1) > 0.6 * span, "bold" if value == top else "normal"
                color = "white" if dark else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, weight=weight)
    axes.set_xticks(range(len(drafts)), drafts)
    for label in axes.get_xticklabels()[len(chains) :]:
        label.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(exits)), [str(e) for e in exits])
    axes.set_xlabel("drafted tokens a step" + (", and trees" if trees else ""))
    axes.set_ylabel("exit layer")
    axes.axvline(len(chains) - 0.5, color="black", linewidth=2 if trees else 0)
    axes.set_title(f"{result['model']}: forecast speedup")
    bar = figure.colorbar(image, ax=axes, label="over plain decoding")
    bar.ax.set_ylim(min(1.0, *best.values()), max(1.0, *best.values()))
    figure.savefig(path, dpi=150)
