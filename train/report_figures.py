"""The figures of a run's report, drawn from its metrics: each an SVG as a data URI, so that the page needs no file."""

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[dict[str, Any]]

_LAST = "#1f2937"  # the last layer's colour
_MANY = 9  # more exits than this: only some are named
_FEW = 4  # exits whose sampled forecasts can be told from the greedy ones
_LEGEND_COLUMNS = 4  # and at most three rows below the figure
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.hashsalt": "layerskip",
}


def losses(train: Records, validation: Records) -> str:
    """Loss of every exit and of the last layer on held-out text, over the last layer's on the training text."""

    def draw(axes: "Axes") -> None:
        seen = [(r["step"], r["last"]) for r in train if "last" in r]
        axes.plot(*_columns(seen), color="#9ca3af", linewidth=1, label="last layer, training text")
        for exit_layer, colour, name in _exits(validation):
            points = [(r["step"], r["exits"][exit_layer]["loss"]) for r in validation if exit_layer in r["exits"]]
            axes.plot(*_columns(points), "o-", color=colour, label=name, gid=f"exit-{exit_layer}")
        axes.plot(
            *_columns([(r["step"], r["last"]["loss"]) for r in validation]),
            "o-",
            color=_LAST,
            label="last layer",
            gid="last",
        )

    return _figure("Loss on held-out text", "nats a token", draw)


def shares(validation: Records, name: str, title: str, label: str) -> str:
    """`agreement` or `overlap` of every exit with the last layer on held-out text."""

    def draw(axes: "Axes") -> None:
        for exit_layer, colour, legend in _exits(validation):
            points = [(r["step"], r["exits"][exit_layer][name]) for r in validation if exit_layer in r["exits"]]
            axes.plot(*_columns(points), "o-", color=colour, label=legend, gid=f"exit-{exit_layer}")
        axes.set_ylim(0, 1)

    return _figure(title, label, draw)


def speedups(validation: Records) -> str:
    """Forecast of every exit on held-out text: greedy as a line, and of few exits sampled dashed; empty without any."""
    known = [record for record in validation if any("forecast" in numbers for numbers in record["exits"].values())]
    if not known:
        return ""

    ways = [("greedy", "o-"), ("sampled", "o--")][: 2 if len(_exits(known)) <= _FEW else 1]

    def draw(axes: "Axes") -> None:
        for exit_layer, colour, name in _exits(known):
            for way, style in ways:
                forecasts = [(r["step"], r["exits"].get(exit_layer, {}).get("forecast", {}).get(way)) for r in known]
                points = [(step, forecast["speedup"]) for step, forecast in forecasts if forecast]
                legend = name if way == "greedy" else None
                axes.plot(*_columns(points), style, color=colour, label=legend, alpha=1 if way == "greedy" else 0.6)
        axes.axhline(1, color="#9ca3af", linewidth=1)
        if len(ways) > 1:
            axes.plot([], [], "--", color="#6b7280", label="dashed: sampled")

    return _figure("Forecast speed-up on held-out text", "× plain decoding", draw)


def schedule(train: Records) -> str:
    """Learning rate, mean layer dropout and the number of early exits trained at a step, each from 0 to its peak."""

    def draw(axes: "Axes") -> None:
        courses = [
            ("learning rate", "{:.2g}", [(r["step"], r["learning_rate"]) for r in train]),
            ("mean layer dropout", "{:.3g}", _scheduled(train, "mean_dropout")),
            ("early exits a step", "{:.3g}", _scheduled(train, "active_exits")),
        ]
        styles = (("#2563eb", "-"), ("#d97706", (0, (6, 3))), ("#059669", (0, (2, 2))))  # constant ones lie together
        for (name, form, points), (colour, style) in zip(courses, styles, strict=True):
            peak = max((value for _, value in points), default=0)
            if peak > 0:
                scaled = [(step, value / peak) for step, value in points]
                axes.plot(*_columns(scaled), color=colour, linestyle=style, label=f"{name}, peak {form.format(peak)}")
        axes.set_ylim(0, 1.08)

    return _figure("Schedule", "share of the peak", draw)


def speed(train: Records) -> str:
    """Tokens a second in training."""

    def draw(axes: "Axes") -> None:
        axes.plot(*_columns([(r["step"], r["tokens_per_second"]) for r in train]), color="#2563eb")
        axes.set_ylim(bottom=0)

    return _figure("Training speed", "tokens a second", draw)


def _scheduled(train: Records, name: str) -> list[tuple[float, float]]:
    return [(r["step"], r["schedule"][name]) for r in train if "schedule" in r]


def _exits(validation: Records) -> list[tuple[str, Any, str | None]]:
    """(exit layer, colour, name in the legend) of every exit, from shallow to deep."""
    from matplotlib import colormaps

    exits = sorted({exit_layer for record in validation for exit_layer in record["exits"]}, key=int)
    every = -(-len(exits) // _MANY)  # rounded up
    colours = colormaps["viridis"]
    return [
        (exit_layer, colours(0.85 * i / max(1, len(exits) - 1)), f"exit {exit_layer}" if i % every == 0 else None)
        for i, exit_layer in enumerate(exits)
    ]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(title: str, label: str, draw: "Callable[[Axes], None]") -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(6.4, 4.2))  # laid out by hand: matplotlib's own layouts double the time
        axes = figure.add_axes((0.115, 0.28, 0.865, 0.62))
        draw(axes)
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        if named := len(axes.get_legend_handles_labels()[0]):
            columns = min(named, _LEGEND_COLUMNS if named > 3 else 2)
            below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.55, 0.175)}
            figure.legend(ncols=columns, columnspacing=1.4, handlelength=1.8, **below)
        image = io.BytesIO()
        figure.savefig(image, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(image.getvalue()).decode()
