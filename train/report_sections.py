"""The sections of a run's report, each from the records it shows; a section without any is empty."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from layerskip.share.run_record import drafts_in_words
from train import before_after
from train import report_figures as figure
from train.report_page import cards, details, figures, sample, section, table

Records = Sequence[dict[str, Any]]

_SHOWN_STEPS = 4  # evaluations whose samples are shown: the first, the last and some between


def summary(name: str, metrics: Records, evaluation: dict[str, Any], config: dict[str, Any]) -> str:
    """The run's name, how far it is, and the few numbers that matter most."""
    train = [record for record in metrics if record["kind"] == "train"]
    steps = max(record["step"] for record in metrics)
    tokens = train[-1]["tokens"] if train else 0
    state = "" if "after" in evaluation else ", still going on or stopped"
    family = (
        f"{config['model_type']}, {config.get('num_hidden_layers', '?')} layers; " if "model_type" in config else ""
    )
    numbers = []
    if change := before_after.last_layer(evaluation):
        big = f"{change['before']:.3f} → {change['after']:.3f}"
        numbers.append(
            (big, f"loss of the whole model on held-out test text, before and after ({change['change']:+.1%})")
        )
    if setting := evaluation.get("setting"):
        forecast = setting["forecast"]
        chosen = f"exit {setting['exit_layer']}, {drafts_in_words(setting)}"
        numbers.append(
            (f"{forecast['speedup']:.2f}×", f"plain decoding, forecast for the model's own text at {chosen}")
        )
        numbers.append((f"{forecast['mean_acceptance_length']:.2f}", "tokens a verify step there, greedy"))
    if train:
        rates = sorted(record["tokens_per_second"] for record in train)
        numbers.append((f"{rates[len(rates) // 2]:,.0f}", "tokens a second in training (median)"))
    lead = f"{family}{steps:,} optimizer steps, {tokens:,} tokens{state}."
    heading = f'<h1>{escape(name)}</h1>\n<p class="lead">LayerSkip training report: {escape(lead)}</p>'
    return heading + (cards(numbers) if numbers else "")


def curves(metrics: Records) -> str:
    """Everything over the optimizer steps."""
    train, validation = ([record for record in metrics if record["kind"] == kind] for kind in ("train", "validation"))
    validation = list({record["step"]: record for record in validation}.values())  # a step measured again: the later
    images = [
        (figure.losses(train, validation), "loss by exit over time"),
        (figure.speedups(validation), "forecast speed-up by exit over time"),
        (
            figure.shares(validation, "agreement", "Agreement with the last layer", "share of positions"),
            "agreement by exit",
        ),
        (figure.shares(validation, "overlap", "Overlap with the last layer", "1 − TV(p, q)"), "overlap by exit"),
        (figure.schedule(train), "learning rate, layer dropout and active exits over time"),
        (figure.speed(train), "tokens a second over time"),
    ]
    lead = (
        "Measured on held-out validation text, which is teacher-forced: agreement is the chance that a greedy draft is "
        "accepted, overlap that a draft sampled at temperature 1 is. Exit E is the output after E layers."
    )
    return section("Over time", figures(images), lead=lead)


def exits_before_and_after(evaluation: dict[str, Any]) -> str:
    """What the training did to every exit and to the model itself."""
    exported = evaluation.get("exported") or {}
    which = f" Exported is the {exported['rule']} checkpoint, of step {exported['step']:,}." if exported else ""
    lead = (
        "On held-out test text, which chose nothing; before → after. Loss in nats a token; the last row is the whole "
        f"model.{which}"
    )
    shown = table(before_after.COLUMNS, before_after.rows(evaluation), strong=-1)
    return section("Before and after", shown, lead=lead)


def forecasts(evaluation: dict[str, Any]) -> str:
    """What self-speculative decoding should bring on this machine."""
    rows = []
    for exit_layer, numbers in ((evaluation.get("after") or {}).get("test") or {}).get("exits", {}).items():
        for way, forecast in (numbers.get("forecast") or {}).items():
            length, speedup = f"{forecast['mean_acceptance_length']:.2f}", f"{forecast['speedup']:.2f}×"
            rows.append([f"exit {exit_layer}, {way}", str(forecast["num_draft_tokens"]), length, speedup])
    known = evaluation.get("forecast_conditions") or {}
    conditions = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())
    lead = (
        "From acceptance on held-out test text and the time that each stage takes on the machine that trained "
        f"({conditions}). Speed-ups are over plain decoding in the same loop. A forecast is not a measurement: "
        "python -m infer benchmark measures."
    )
    columns = ("", "best number of drafts", "tokens a verify step", "forecast speed-up")
    setting = evaluation.get("setting")
    text = ""
    if setting:
        split = "those" if setting.get("chosen_on") == "tune" else "test"
        text = (
            f"<p>The checkpoint is tuned to exit {setting['exit_layer']} and {drafts_in_words(setting)}: the fastest "
            f"where the model itself continues held-out validation prompts. On its own continuations of {split} "
            f"prompts that gives {setting['forecast']['mean_acceptance_length']:.2f} tokens a verify step and "
            f"{setting['forecast']['speedup']:.2f}×. A model's own text is unlike text of others, so these numbers "
            "differ from the table's.</p>"
        )
    return section("Forecast", table(columns, rows), text, lead=lead) if rows else ""


def measured(benchmark: dict[str, Any]) -> str:
    """What `python -m infer benchmark RUN --json RUN/benchmark.json` measured, if it did."""
    rows = []
    for mode in ("greedy", "sampled"):
        for arm in benchmark.get(mode) or []:
            drafts = arm.get("drafts") or arm.get("num_draft_tokens")
            setting = f"{arm['exit_layer']} / {drafts}" if arm.get("exit_layer") else "–"
            numbers = [arm.get(name) for name in ("tokens_per_second", "speedup", "mean_acceptance_length")]
            cells = ["–" if number is None else f"{number:.2f}" for number in numbers]
            rows.append([f"{mode}: {arm['arm']}", setting, *cells])
    columns = ("", "exit / drafts", "tokens/s", "× plain", "tokens a verify step")
    known = benchmark.get("conditions") or {}
    conditions = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return section("Measured", table(columns, rows), lead=conditions)


def samples(records: Records) -> str:
    """The same held-out prompts, continued as the training went on."""
    by_prompt: dict[str, dict[int, str]] = {}
    for record in records:
        by_prompt.setdefault(record["prompt"], {})[record["step"]] = record["continuation"]
    shown = []
    for prompt, texts in by_prompt.items():
        steps = sorted(texts)
        last = len(steps) - 1
        picked = sorted({steps[round(i * last / (_SHOWN_STEPS - 1))] for i in range(_SHOWN_STEPS)})
        shown.append(sample(prompt, [(step, texts[step]) for step in picked]))
    lead = "Held-out prompts (grey), continued greedily by the whole model. All of them are in samples.jsonl."
    return section("What the model writes", *shown, lead=lead)


def origin(provenance: dict[str, Any], settings: str) -> str:
    """How the run was started, each time, and with what."""
    launches = provenance.get("launches") or []
    rows = []
    for launch in launches:
        versions = ", ".join(f"{name} {version}" for name, version in launch.get("versions", {}).items())
        rows.append(
            [launch.get("time", ""), " ".join(launch.get("argv", [])), str(launch.get("commit") or ""), versions]
        )
    columns = ("started", "arguments", "commit", "versions")
    texts = [details("All settings (config.yaml)", settings)] if settings else []
    if provenance:
        texts.append(details("provenance.json", json.dumps(provenance, indent=2)))
    return section("Where it comes from", table(columns, rows, text=True), *texts)
