"""The figures of a benchmark's page, drawn from its records: SVGs as data URIs, for light pages and for dark ones."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from infer.benchmarking.page_figures import LIGHT, Palette, columns, figure, legend_below, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[dict[str, Any]]
Images = tuple[str, str] | None  # light, dark

_MOST_DOTS = 80  # prompts of which each has a dot
_MOST_ROWS = 14  # of the figure that compares with the cost model


_PART_NAMES = {"first_token": "to the first token", "decode": "not told apart"}
_MARKERS = "osD^vPX*"


def label(record: dict[str, Any]) -> str:
    """An arm, and where it has them its exit layer and what that drafts."""
    if record.get("drafts") is None or record["exit_layer"] is None:
        return str(record["arm"])
    return f"{record['arm']} {record['exit_layer']}/{record['drafts'].partition(', lookup')[0]}"


def speedups(records: Records) -> Images:
    """Speedup of every arm over the first: a bar, the spread of the repeats, a dot for each prompt, a diamond without
    prefill."""
    shown = [record for record in records[1:] if record.get("speedup")]

    def draw(axes: "Axes", palette: Palette) -> None:
        for row, record in enumerate(shown):
            faster = record["speedup"] > 1
            axes.barh(row, record["speedup"], 0.56, color=palette.series[0] if faster else palette.soft, alpha=0.85)
            axes.plot(_range(record), (row, row), color=palette.ink, linewidth=1.6, solid_capstyle="butt")
            dots = [ratio for ratio in record["speedup_by_prompt"] if ratio is not None]
            if 1 < len(dots) <= _MOST_DOTS:
                axes.scatter(dots, [row + 0.36] * len(dots), s=11, color=palette.soft, linewidths=0, zorder=3)
            if record.get("decode_speedup"):
                face: dict[str, Any] = {"facecolor": palette.back, "edgecolor": palette.ink}
                axes.scatter(record["decode_speedup"], row, s=34, marker="D", linewidths=1.2, zorder=4, **face)
        axes.axvline(1, color=palette.ink, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlabel("× plain generate")
        name_rows(axes, _names(shown))

    return figure("Speedup", draw, 0.4 * len(shown) + 0.2, _names(shown)) if shown else None


def grid(tried: Records) -> Images:
    """Speedup by exit layer and draft length of this kit's chains, where several of them were tried."""
    chains = [r for r in tried if r["arm"] == "self-speculative" and r.get("speedup") and r["exit_layer"] is not None]
    exits = sorted({record["exit_layer"] for record in chains})
    lengths = sorted({record["num_draft_tokens"] for record in chains})
    found = {(record["exit_layer"], record["num_draft_tokens"]): record["speedup"] for record in chains}

    def draw(axes: "Axes", palette: Palette) -> None:
        from matplotlib.colors import TwoSlopeNorm

        nan = float("nan")
        values = [[found.get((exit_layer, length), nan) for length in lengths] for exit_layer in exits]
        norm = TwoSlopeNorm(1, min(0.5, *found.values()), max(2.2, *found.values()))
        axes.pcolormesh(values, cmap="RdBu", norm=norm, edgecolors=palette.back, linewidth=2)
        for (exit_layer, length), value in found.items():
            best = value == max(found.values())
            place = (lengths.index(length) + 0.5, exits.index(exit_layer) + 0.5)
            colour = "white" if abs(norm(value) - 0.5) > 0.3 else "#111827"
            weight = "bold" if best else "normal"
            text = f"{value:.2f}{'  best' if best else ''}"
            axes.text(*place, text, ha="center", va="center", color=colour, weight=weight)
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], [str(length) for length in lengths])
        axes.set_yticks([i + 0.5 for i in range(len(exits))], [str(exit_layer) for exit_layer in exits])
        axes.set(xlabel="tokens drafted a round", ylabel="exit layer")
        axes.grid(False)
        axes.tick_params(length=0)

    few = min(len(exits), 8)
    return figure("Speedup by exit and draft length", draw, 0.55 * few + 0.3) if len(found) > 1 else None


def acceptance(records: Records) -> Images:
    """Share of the drafts at each position that was accepted, a line for each arm."""
    shown = [record for record in records if record.get("acceptance_by_position")][: len(_MARKERS)]

    def draw(axes: "Axes", palette: Palette) -> None:
        for colour, marker, record in zip(palette.series, _MARKERS, shown, strict=False):
            rates = record["acceptance_by_position"]
            axes.plot(range(1, len(rates) + 1), rates, f"{marker}-", color=colour, label=label(record))
        longest = max(len(record["acceptance_by_position"]) for record in shown)
        axes.set_xticks(range(1, longest + 1))
        axes.set(ylim=(0, 1.02), xlabel="position in the draft", ylabel="share accepted")
        legend_below(axes)

    return figure("Acceptance by position", draw, 2.7) if shown else None


def parts(records: Records) -> Images:
    """Milliseconds that every arm takes for a token, by what they went into."""
    shown = [record for record in records if record.get("seconds_by_part") and record["tokens"]]
    names = [name for name in LIGHT.parts if any(name in record["seconds_by_part"] for record in shown)]

    def draw(axes: "Axes", palette: Palette) -> None:
        for row, record in enumerate(shown):
            left = 0.0
            for name, seconds in record["seconds_by_part"].items():
                width = 1000 * seconds / record["tokens"]
                axes.barh(row, width, 0.62, left=left, color=palette.parts[name], linewidth=0)
                left += width
            if record.get("num_drafted"):
                told = f"  {record['mean_acceptance_length']:.2f} tokens a round"
                axes.text(left, row, told, va="center", fontsize=9, color=palette.soft)
        for name in names:
            if name != "first_token" or "prefill" not in names:
                axes.barh(0, 0, color=palette.parts[name], label=_PART_NAMES.get(name, name))
        axes.margins(x=0.34)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms a token")
        name_rows(axes, _names(shown))
        legend_below(axes)

    return figure("Where the time of a token goes", draw, 0.36 * len(shown) + 0.2, _names(shown)) if shown else None


def against_ideal(records: Records, tried: Records) -> Images:
    """Speedup over plain decoding in the same loop: measured after the first tokens, and what the costs allow."""
    rows = [*_with_ideal(records, ""), *_with_ideal(tried, " (validation)")][:_MOST_ROWS]

    def draw(axes: "Axes", palette: Palette) -> None:
        kinds: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
            ("weights_read", "D", "ideal: weights read", {"facecolor": palette.back, "edgecolor": palette.soft}),
            ("stage_seconds", "s", "ideal: this machine's stages", {"color": palette.series[1]}),
            ("measured", "o", "measured", {"color": palette.series[0]}),
        )
        for row, (_, values) in enumerate(rows):
            axes.plot((min(values.values()), max(values.values())), (row, row), color=palette.soft, linewidth=1)
        for name, marker, said, look in kinds:
            points = [(values[name], row) for row, (_, values) in enumerate(rows)]
            axes.scatter(*columns(points), s=44, marker=marker, zorder=3, label=said, **look)
        axes.axvline(1, color=palette.ink, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlabel("× plain decoding in the same loop, after the first tokens")
        name_rows(axes, [name for name, _ in rows])
        legend_below(axes)

    return figure("Measured and ideal", draw, 0.32 * len(rows) + 0.2, [name for name, _ in rows]) if rows else None


def batches(records: Records) -> Images:
    """Tokens per second over plain decoding of the same batch, by batch size."""
    shown = [record for record in records if record["error"] is None]
    arms = list(dict.fromkeys(record["arm"] for record in shown))

    def draw(axes: "Axes", palette: Palette) -> None:
        for colour, marker, arm in zip(palette.series, _MARKERS, arms, strict=False):
            points = [(record["batch_size"], record["ratio"]) for record in shown if record["arm"] == arm]
            axes.plot(*columns(points), f"{marker}-", color=colour, label=arm)
        sizes = sorted({record["batch_size"] for record in shown})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.axhline(1, color=palette.ink, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlabel="prompts in a batch", ylabel="× plain generate", ylim=(0, None))
        legend_below(axes)

    return figure("Speedup by batch size", draw, 2.7) if shown else None


def _with_ideal(records: Records, suffix: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each record that has one: its name, and speedups over this kit's loop, or over plain where it was not run."""
    loop = next((record for record in records if record["arm"] == "plain loop"), records[0] if records else {})
    for record in records:
        speed, plain = record.get("decode_tokens_per_second"), loop.get("decode_tokens_per_second")
        if record.get("ideal") and speed and plain:
            yield label(record) + suffix, {**record["ideal"], "measured": speed / plain}


def _names(records: Records) -> list[str]:
    return [label(record) for record in records]


def _range(record: dict[str, Any]) -> tuple[float, float]:
    found = record["speedup_by_repeat"] or [record["speedup"]]
    return min(found), max(found)
