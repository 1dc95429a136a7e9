"""The choice that `tune` makes of what it measured, and where it is kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.loading import Loaded
from infer.options import ModelOptions
from infer.tune import TuneOptions
from layerskip.checkpoint.settings import KEY, Setting, store_setting
from layerskip.checkpoint.whole_files import write_json
from layerskip.forecast import Forecast, tree_name
from layerskip.share.card import write_model_card

OFF = Setting(None, 0)  # plain decoding
LEAST_GAIN = 1.02  # of a setting over plain decoding, measured; below, it is noise or not worth the memory


def decide(forecasts: Sequence[Forecast], records: Sequence[dict[str, Any]]) -> tuple[Setting, str]:
    """The setting, and why.

    Args:
        records: of `confirm`.
    """
    if not records:
        return OFF, f"the best forecast is {forecasts[0].speedup:.2f}x plain decoding: too little to measure it"
    loop = records[1].get("speedup") or 0.0  # what "off" will do: this kit's loop without drafts
    running = [record for record in records[2:] if record["error"] is None]
    if not running:
        return OFF, f"decoding failed: {records[2]['error']}"
    best = max(running, key=lambda record: record["speedup"])
    told = f"{best['speedup']:.2f}x plain decoding measured ({best['forecast_speedup']:.2f}x forecast)"
    if best["speedup"] <= LEAST_GAIN * max(1.0, loop):
        against = f", the loop without drafts {loop:.2f}x" if loop > 1 else ""
        return OFF, f"{told}{against}: less than {LEAST_GAIN - 1:.0%} gained"
    chosen = Setting(
        best["exit_layer"], best["num_draft_tokens"], tree=best.get("tree"), draft_vocabulary=best["draft_vocabulary"]
    )
    return chosen, told


def write_setting(
    folder: Path, loaded: Loaded, setting: Setting, conditions: dict[str, Any], found: dict[str, Any] | None
) -> list[Path]:
    """Put the setting into the folder's generation_config.json, and where the run has a record of its setting or a
    model card made from it, there too. Each file whole or not at all; all else in it stays.

    Args:
        conditions: under which the choice was made; the dtype is stored beside the setting.
        found: of the setting "forecast" and "measured", {"mean_acceptance_length", "speedup"} each; None if it is off.

    Returns:
        The files that were written.
    """
    store_setting(loaded.model, setting)
    config, path = loaded.model.generation_config, folder / "generation_config.json"
    # Without the file, transformers makes the config from the model's: then all of it is written.
    stored: dict[str, Any] = json.loads(path.read_text("utf-8") if path.is_file() else config.to_json_string())
    stored.pop("_from_model_config", None)  # with it, transformers would make it anew, without ours
    kept = getattr(config, KEY) | {"tuned_for": {name: conditions[name] for name in _TUNED_FOR}}
    write_json(path, {**stored, KEY: kept})
    written, evaluation, card = [path], folder / "evaluation.json", folder / "README.md"
    if evaluation.is_file():
        record = json.loads(evaluation.read_text("utf-8"))
        own = None if found is None else {**getattr(config, KEY), "chosen_on": "tune", **found}
        known = {name: conditions[name] for name in (*_TUNED_FOR, "batch_size")}
        write_json(evaluation, {**record, "setting": own, "forecast_conditions": known})
        written.append(evaluation)
    before = card.read_bytes() if card.is_file() else None
    if before is not None:
        write_model_card(folder)  # leaves a card alone that somebody has made their own
        written += [card] if card.read_bytes() != before else []
    return written


_TUNED_FOR = ("device", "threads", "dtype")


def dtype_hint(folder: Path, model: ModelOptions) -> str | None:
    """What to do where the choice that was written was made in another dtype than the folder is decoded in."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    usual = config.get("dtype") or config.get("torch_dtype") or "float32"
    if model.dtype in ("auto", usual):
        return None
    return (
        f"the choice holds for {model.dtype}, but without --dtype the checkpoint is decoded in {usual}: give --dtype "
        f"{model.dtype} there too, or tune without --dtype"
    )


def how_to_use(model: ModelOptions, options: TuneOptions, setting: Setting) -> str:
    """The line to run with the choice, under the conditions that it was made for."""
    flags = "--exit-layer none"
    if setting.exit_layer is not None:
        drafts = f"--num-draft-tokens {setting.num_draft_tokens}"
        drafts = drafts if setting.tree is None else f"--tree {tree_name(setting.tree)}"
        flags = f"--exit-layer {setting.exit_layer} {drafts}"
        flags += "" if setting.draft_vocabulary else " --no-draft-vocabulary"
    given: dict[str, Any] = {"--dtype": None if model.dtype == "auto" else model.dtype, "--device": model.device}
    given |= {"--threads": model.threads, "--temperature": options.temperature or None, "--top-p": options.top_p}
    flags += "".join(f" {flag} {value}" for flag, value in given.items() if value is not None)
    return (
        f"nothing is written: --write puts the choice into the checkpoint. To decode with it as it is:\n"
        f"python -m infer generate {model.model} {flags} PROMPT"
    )
