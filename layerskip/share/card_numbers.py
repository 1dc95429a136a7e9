"""The model card's numbers: the last layer and every exit before and after training, and the speed."""

from __future__ import annotations

import math
from typing import Any

from layerskip.share.card_text import cell, table
from layerskip.share.run_record import RunRecord, drafts_in_words


def quality(run: RunRecord) -> str:
    """The last layer before and after: what training for drafting cost the model, or brought it."""
    after, before = run.last_loss("after"), run.last_loss("before")
    if after is None:
        return ""
    rows = [("after training", f"{after:.4f}", f"{math.exp(after):.2f}")]
    change = ""
    if before is not None:
        rows.insert(0, ("before training", f"{before:.4f}", f"{math.exp(before):.2f}"))
        change = f" Its loss changed by {after / before - 1:+.1%}."
    where = f"The whole model on held-out text ({run.split} split)."
    return f"## Quality\n\n{where}{change}\n\n" + table(("", "loss (nats a token)", "perplexity"), rows)


def exits(run: RunRecord) -> str:
    """A line for every exit."""
    found = run.measured("after").get("exits") or run.layerskip.get("exits") or {}
    if not found:
        return ""
    known = run.measured("before").get("exits") or {}
    rows = [
        (exit_layer, *(_change(known.get(exit_layer), numbers, key) for key in ("loss", "agreement", "overlap")))
        for exit_layer, numbers in sorted(found.items(), key=lambda item: int(item[0]))
    ]
    if run.last_loss("after") is not None:
        before, after = (run.measured(when).get("last") for when in ("before", "after"))
        rows.append(("whole model", _change(before, after, "loss"), "1", "1"))
    text = (
        "## Exits\n\nEvery exit on held-out text: its loss (nats a token), how often its most probable token "
        "is the whole model's (`agreement`: accepted when decoding greedily), and how much the two "
        "distributions share (`overlap`: accepted when sampling at temperature 1)"
        + ("; before → after training.\n\n" if known else ".\n\n")
    )
    return text + table(("layers run", "loss", "agreement", "overlap"), rows)


def _change(before: dict[str, Any] | None, after: dict[str, Any] | None, key: str) -> str:
    """One number, with what it was before training, if that is known."""
    number = cell((after or {}).get(key))
    return f"{cell(before[key])} → {number}" if before and key in before else number


def speed(run: RunRecord) -> str:
    """What was measured, with its conditions; else the forecast; and the pictures of the run."""
    modes = [mode for mode in ("greedy", "sampled") if run.benchmark.get(mode)]
    pictures = "\n\n".join(f"![{_caption(name)}]({name})" for name in run.pictures)
    if not modes:
        said = _forecast(run.evaluation)
        return "\n\n".join(filter(None, (said or ("## Speed" if pictures else ""), pictures)))
    known = {name: value for name, value in run.benchmark.get("conditions", {}).items() if value is not None}
    conditions = [f"{name} ({cell(v)})" if isinstance(v, dict) else f"{name} {cell(v)}" for name, v in known.items()]
    parts = ["## Speed", "Measured, all ways of decoding side by side on the same prompts."]
    for mode in modes:
        rows = [_speed_row(arm) for arm in run.benchmark[mode]]
        parts.append(f"{mode.capitalize()}:\n\n" + table(_SPEED_COLUMNS, rows))
    parts.append("Conditions: " + ", ".join(conditions) + ".")
    return "\n\n".join(filter(None, (*parts, pictures)))


_SPEED_COLUMNS = ("", "exit layer", "drafts", "tokens/s", "speedup (repeats)", "tokens a verify step", "equal outputs")


def _speed_row(arm: dict[str, Any]) -> tuple[str, ...]:
    setting = (cell(arm.get("exit_layer")), cell(arm.get("drafts") or arm.get("num_draft_tokens")))
    if arm.get("error"):
        return (f"{arm['arm']} (failed)", *setting, "-", "-", "-", "-")
    equal = f"{arm['equal_outputs']} of {arm['num_outputs']}" if "equal_outputs" in arm else "-"
    rate, speedup, accepted = (
        cell(arm.get(key), 2) for key in ("tokens_per_second", "speedup", "mean_acceptance_length")
    )
    spread = arm.get("speedup_by_repeat") or []
    if len(spread) > 1 and min(spread) < max(spread):
        speedup += f" ({cell(min(spread), 2)} to {cell(max(spread), 2)})"
    return (arm["arm"], *setting, rate, speedup, accepted, equal)


def _forecast(evaluation: dict[str, Any]) -> str:
    setting = evaluation.get("setting") or {}
    forecast = setting.get("forecast")
    if not forecast:
        return ""
    known = evaluation.get("forecast_conditions") or {}
    conditions = ", ".join(f"{name} {cell(value)}" for name, value in known.items())
    interval = forecast.get("interval")
    spread = f" (9 in 10: {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    measured, known = setting.get("measured") or {}, "Not measured yet."
    if measured.get("speedup"):
        known = (
            "Measured when it was tuned, on a few other prompts: "
            f"{cell(measured.get('mean_acceptance_length'), 2)} tokens a verify step, {measured['speedup']:.2f} times "
            "plain `generate`."
        )
    return (
        f"## Speed\n\n{known} Forecast from how the model continues held-out prompts and what each stage costs, for "
        f"exit layer {setting.get('exit_layer')} and {drafts_in_words(setting)}: "
        f"{forecast['mean_acceptance_length']:.2f} tokens a verify step, {forecast['speedup']:.2f} times{spread} "
        f"plain decoding in the same loop ({conditions})."
    )


def _caption(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[0].replace("_", " ").replace("-", " ")
