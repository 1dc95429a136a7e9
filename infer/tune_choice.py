"""The choice that `tune` makes of what it measured, and where it is kept."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.loading import Loaded
from infer.options import ModelOptions
from infer.tune import TuneOptions
from layerskip.forecast import Forecast
from layerskip.settings import KEY, Setting, store_setting

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
    setting = Setting(best["exit_layer"], best["num_draft_tokens"], draft_vocabulary=best["draft_vocabulary"])
    return setting, told


def write_setting(folder: Path, loaded: Loaded, setting: Setting) -> Path:
    """Put the setting into the folder's generation_config.json, whole or not at all; all else there stays."""
    store_setting(loaded.model, setting)
    config, path = loaded.model.generation_config, folder / "generation_config.json"
    # Without the file, transformers makes the config from the model's: then all of it is written.
    stored: dict[str, Any] = json.loads(path.read_text("utf-8") if path.is_file() else config.to_json_string())
    stored.pop("_from_model_config", None)  # with it, transformers would make it anew, without ours
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**stored, KEY: getattr(config, KEY)}, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def how_to_use(model: ModelOptions, options: TuneOptions, setting: Setting) -> str:
    """The line to run with the choice, under the conditions that it was made for."""
    flags = "--exit-layer none"
    if setting.exit_layer is not None:
        flags = f"--exit-layer {setting.exit_layer} --num-draft-tokens {setting.num_draft_tokens}"
        flags += "" if setting.draft_vocabulary else " --no-draft-vocabulary"
    given: dict[str, Any] = {"--dtype": None if model.dtype == "auto" else model.dtype, "--device": model.device}
    given |= {"--threads": model.threads, "--temperature": options.temperature or None, "--top-p": options.top_p}
    flags += "".join(f" {flag} {value}" for flag, value in given.items() if value is not None)
    return (
        f"nothing is written: --write puts the choice into the checkpoint. To decode with it as it is:\n"
        f"python -m infer generate {model.model} {flags} PROMPT"
    )
