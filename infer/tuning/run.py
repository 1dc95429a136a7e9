"""The tuning itself: one teacher-forced pass and a few timings make the forecasts, decoding confirms the best."""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from infer.benchmarking.arms import plain, plain_loop, self_speculative
from infer.benchmarking.comparison import measure_arms
from infer.benchmarking.measurement import Protocol
from infer.benchmarking.output import name_of
from infer.benchmarking.questions import encode
from infer.conditions import conditions
from infer.files import write_record
from infer.loading import Loaded, load
from infer.options import ModelOptions
from infer.prompts import Prompts
from infer.terminal import Terminal
from infer.tune import TuneOptions
from infer.tuning import record as tune_record
from infer.tuning import report as tune_report
from infer.tuning.choice import decide, dtype_hint, how_to_use, write_setting
from infer.tuning.evidence import Evidence, look
from layerskip.checkpoint.settings import Setting
from layerskip.forecast import Forecast

HOPELESS = 0.95  # a forecast below this is not measured: it would have to be off by twice its usual error
_NEAR = 0.95  # of the best forecast: the next one is measured too


def tune(model: ModelOptions, options: TuneOptions, prompts: Prompts, folder: Path | None, terminal: Terminal) -> int:
    """Forecast all settings, confirm the best, show, and store it if asked to; returns the exit code, 0.

    Raises:
        InputError: if the model or the prompts cannot be used.
    """
    loaded = load(model, options.exit_layers or ())
    validation, test = (encode(loaded, texts, options) for texts in (prompts.validation, prompts.test))
    evidence = look(loaded, options, validation, terminal)
    test = test[: math.ceil(options.num_prompts / 4)]  # decoding them takes longer than all the rest
    records = confirm(loaded, options, evidence, test, terminal)
    setting, reason = decide(evidence.forecasts, records)
    counts = {"num_prompts": len(validation), "num_confirmed": len(test) if records else 0}
    found = conditions(loaded.model) | {"prompts": prompts.source, **_scope(options), **counts}
    result = tune_record.record(name_of(loaded), found, evidence, records, setting, reason)
    tune_report.show(result, terminal)
    if options.png is not None:
        tune_report.draw(result, options.png)
        terminal.note(f"drew {options.png}")
    if options.write and folder is not None:
        written = write_setting(folder, loaded, setting, found, promise(evidence, records, setting))
        terminal.note(f"wrote {', '.join(map(str, written))}")
        if hint := dtype_hint(folder, model):
            terminal.note(hint)
    else:
        terminal.note(how_to_use(model, options, setting))
    write_record(result, None)
    return 0


def _scope(options: TuneOptions) -> dict[str, Any]:
    names = ("prompt_tokens", "max_new_tokens", "temperature", "top_p", "seed")
    return {name: getattr(options, name) for name in names}


def setting_of(forecast: Forecast) -> Setting:
    """The setting that a forecast is about."""
    return Setting(
        forecast.exit_layer,
        forecast.num_draft_tokens,
        tree=forecast.tree,
        draft_vocabulary=forecast.draft_vocabulary,
    )


def promise(evidence: Evidence, records: Sequence[dict[str, Any]], setting: Setting) -> dict[str, Any] | None:
    """What was forecast and measured of the setting that was chosen, to be kept with it; None where it is off."""
    chosen = next((forecast for forecast in evidence.forecasts if setting_of(forecast) == setting), None)
    if chosen is None:
        return None
    names = ("mean_acceptance_length", "speedup")
    known = ("exit_layer", "num_draft_tokens", "tree", "draft_vocabulary")
    measured = next((r for r in records[2:] if all(r.get(name) == getattr(chosen, name) for name in known)), {})
    forecast = {name: round(getattr(chosen, name), 4) for name in names} | {"interval": _interval(chosen)}
    return {"forecast": forecast, "measured": {name: measured.get(name) for name in names}}


def _interval(forecast: Forecast) -> list[float] | None:
    return None if forecast.interval is None else [round(end, 4) for end in forecast.interval]


def rivals(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """What is worth measuring: the best, and the best of another exit, head or kind (chain, tree) where it is near.
    Two lengths of one exit are told apart by the forecast better than by a few prompts."""
    first = forecasts[0]

    def kind(forecast: Forecast) -> tuple[int, bool, bool]:
        return forecast.exit_layer, forecast.draft_vocabulary, forecast.tree is None

    others = (each for each in forecasts if kind(each) != kind(first) and each.speedup >= _NEAR * first.speedup)
    return [first, *islice(others, 1)]


def confirm(
    loaded: Loaded, options: TuneOptions, evidence: Evidence, prompts: Sequence[Tensor], terminal: Terminal
) -> list[dict[str, Any]]:
    """Decode held-out prompts plainly and with the best settings, interleaved.

    Returns:
        A record each, plain decoding first, this kit's loop without drafts second; none where the forecast leaves no
        hope.
    """
    best = rivals(evidence.forecasts)
    if best[0].speedup < HOPELESS:
        return []
    arms = [plain(), plain_loop(), *(self_speculative(setting_of(forecast)) for forecast in best)]
    protocol = Protocol(prompts, options.decoding().generate_arguments(), seed=options.seed or 0)
    records = measure_arms(loaded, arms, protocol, terminal)
    for record, forecast in zip(records[2:], best, strict=True):
        record["draft_vocabulary"], record["tree"] = forecast.draft_vocabulary, forecast.tree
        record["forecast_speedup"] = round(forecast.speedup, 4)
        record["forecast_interval"] = _interval(forecast)
        record["ideal"] = of_the_ideal(evidence, forecast, record, records[0])
    return records


def of_the_ideal(
    evidence: Evidence, forecast: Forecast, record: dict[str, Any], baseline: dict[str, Any]
) -> dict[str, float] | None:
    """What was reached of the speed-up that layers and head alone would give at the acceptance that was measured, and
    where the rest of the time went, as shares of it. Prompts are left out on both sides.

    Returns:
        measured, ideal, share = measured / ideal, and rollback (rule, stops, cache), between (rounds, in Python) and
        passes (drafting and verifying beyond the timed layers: choosing tokens, masks), which add up to 1 - share.
    """
    parts, speed = record.get("seconds_by_part"), record.get("decode_tokens_per_second")
    baseline_speed, length = baseline.get("decode_tokens_per_second"), record.get("mean_acceptance_length")
    if not parts or not speed or not baseline_speed or not length:
        return None
    costs, draft = evidence.costs, forecast.tree or forecast.num_draft_tokens
    cut = evidence.has_vocabulary and forecast.draft_vocabulary
    ideal = length * costs.plain / costs.layers(forecast.exit_layer, draft, cut)
    measured, spent = speed / baseline_speed, sum(parts.values()) - parts.get("prefill", 0.0)
    lost = {"rollback": parts.get("rollback", 0.0) / spent, "between": parts.get("other", 0.0) / spent}
    share = measured / ideal
    values = {"measured": measured, "ideal": ideal, "share": share, **lost, "passes": 1 - share - sum(lost.values())}
    return {name: round(value, 4) for name, value in values.items()}
