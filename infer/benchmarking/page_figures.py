"""How the figures of a page look: SVGs as data URIs, one for light pages and one for dark."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 6.0  # inches, with the names of rows
_LETTER = 0.082  # inches that a letter of these takes


@dataclass(frozen=True)
class Palette:
    """Colours on a light page or on a dark one."""

    ink: str
    soft: str
    grid: str
    back: str
    series: tuple[str, ...]  # of arms, told apart by those who see few colours as well: markers differ too
    parts: dict[str, str]  # of a call's time


LIGHT = Palette(
    *("#1f2937", "#6b7280", "#e5e7eb", "#ffffff"),
    series=("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d"),
    parts={
        "prefill": "#94a3b8",
        "first_token": "#94a3b8",
        "decode": "#cbd5e1",
        "draft": "#2563eb",
        "verify": "#f59e0b",
        "rollback": "#059669",
        "other": "#a78bfa",
    },
)
DARK = Palette(
    *("#e5e7eb", "#94a3b8", "#2a3750", "#131c2e"),
    series=("#60a5fa", "#fbbf24", "#34d399", "#f87171", "#a78bfa", "#22d3ee", "#f472b6", "#a3e635"),
    parts={
        "prefill": "#94a3b8",
        "first_token": "#94a3b8",
        "decode": "#475569",
        "draft": "#60a5fa",
        "verify": "#fbbf24",
        "rollback": "#34d399",
        "other": "#a78bfa",
    },
)

Draw = Callable[["Axes", Palette], None]


def name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Names of rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """(x, y) points as all x and all y."""
    return [x for x, _ in points], [y for _, y in points]


def legend_below(axes: "Axes") -> None:
    """Names of the lines and colours, below the axis's label."""
    named = len(axes.get_legend_handles_labels()[0])
    height = axes.get_window_extent().height / 72  # inches
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.52 / height)}
    axes.legend(ncols=min(named, 3), columnspacing=1.4, handlelength=1.6, **below)


def figure(title: str, draw: Draw, height: float, names: Sequence[str] = ()) -> tuple[str, str]:
    """Of so many inches; `names` of rows take their share of the width, so that letters are of one size everywhere."""
    left = max((len(name) for name in names), default=7) * _LETTER + 0.1
    light, dark = (_svg(title, draw, (left, height), palette) for palette in (LIGHT, DARK))
    return light, dark


def _svg(title: str, draw: Draw, sizes: tuple[float, float], palette: Palette) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    left, height = sizes
    with matplotlib.rc_context(_style(palette)):
        figure = Figure(figsize=(_WIDTH, height), dpi=72)
        axes = figure.add_axes((left / _WIDTH, 0, 1 - left / _WIDTH, 1))
        axes.set_title(title)
        draw(axes, palette)
        image = io.BytesIO()
        figure.savefig(image, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.06)
    return "data:image/svg+xml;base64," + base64.b64encode(image.getvalue()).decode()


def _style(palette: Palette) -> dict[Any, Any]:
    return {
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.edgecolor": palette.soft,
        "axes.labelcolor": palette.ink,
        "axes.titlecolor": palette.ink,
        "axes.facecolor": palette.back,
        "figure.facecolor": palette.back,
        "savefig.facecolor": palette.back,
        "text.color": palette.ink,
        "xtick.color": palette.ink,
        "ytick.color": palette.ink,
        "grid.color": palette.grid,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "svg.hashsalt": "layerskip",
    }
