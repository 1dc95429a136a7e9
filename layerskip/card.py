"""The model card, from a run's own numbers. Imports neither torch nor transformers.

A run folder holds an ordinary Hugging Face checkpoint and, where they are known, the numbers of the run:

    config.json              "layerskip": {"recipe": {...}, "exits": {"2": {"loss", "agreement", "overlap"}},
                             "draft_vocabulary": {"size": n}}
    generation_config.json   "layerskip": {"exit_layer", "num_draft_tokens"}
    evaluation.json          losses before and after training, every exit, the forecast
    benchmark.json           what `python -m infer benchmark RUN --json RUN/benchmark.json` measured
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

_MARK = "<!-- Written from the run's own numbers. Remove this line, and your changes to the card are kept. -->"


class HubError(RuntimeError):
    """The run cannot be described or uploaded; the message says why and what to do."""


def write_model_card(run_dir: Path, repo_id: str | None = None, license: str | None = None) -> None:
    """Write README.md from the run's numbers, unless somebody has made it their own (see its comment)."""
    path = run_dir / "README.md"
    if path.is_file() and _MARK not in path.read_text(encoding="utf-8"):
        return
    path.write_text(model_card(run_dir, repo_id, license), encoding="utf-8")


def model_card(run_dir: Path, repo_id: str | None = None, license: str | None = None) -> str:
    """The model card as text. What is not known of the run is left out.

    Args:
        repo_id: how the card's examples name the model; None is the folder's name.
        license: as the Hub names it; None is what an earlier card said, if there is one.
    """
    run = {name: read_json(run_dir / f"{name}.json") for name in ("config", "evaluation", "benchmark")}
    setting = read_json(run_dir / "generation_config.json").get("layerskip") or {}
    data = _metadata(run_dir, license)
    name = repo_id or run_dir.resolve().name
    layerskip = run["config"].get("layerskip") or {}
    sections = (
        _introduction(name, run["config"], setting, data.base_model),
        _usage(name, setting),
        _recipe(layerskip.get("recipe"), run["evaluation"]),
        _exits(layerskip.get("exits"), run["evaluation"]),
        _speed(run["benchmark"], run["evaluation"]),
        _LIMITS,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_MARK}\n\n" + "\n\n".join(filter(None, sections)) + "\n"))


def _metadata(run_dir: Path, license: str | None) -> ModelCardData:
    path = run_dir / "config.yaml"
    settings = path.read_text(encoding="utf-8") if path.is_file() else ""
    dataset, earlier = _hub_id(settings, "data", "dataset"), run_dir / "README.md"
    if license is None and earlier.is_file():
        license = ModelCard.load(earlier, ignore_metadata_errors=True).data.get("license")
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["layerskip", "self-speculative-decoding", "early-exit"],
        license=license,
        base_model=_hub_id(settings, "model", "name_or_path"),
        datasets=[dataset] if dataset else None,
    )


def _introduction(name: str, config: dict[str, Any], setting: dict[str, Any], base_model: Any) -> str:
    num_layers = _num_layers(config)
    origin = f", from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    text = (
        f"# {name.rpartition('/')[2]}\n\n"
        f"A language model that drafts for itself, trained with LayerSkip{origin}: its early layers predict "
        "well enough to propose tokens, and the remaining layers verify them, several in one pass. The "
        "output is that of the whole model. There is one set of weights and no second model to load."
    )
    if setting.get("exit_layer") and num_layers:
        drafts, tree = f"up to {setting.get('num_draft_tokens')} tokens a step", setting.get("tree")
        drafts = drafts if tree is None else f"candidate trees ({tree if isinstance(tree, str) else list(tree)})"
        text += f" Tuned setting: {setting['exit_layer']} of {num_layers} layers draft {drafts}."
    size = ((config.get("layerskip") or {}).get("draft_vocabulary") or {}).get("size")
    if size:
        text += f" The draft's head knows the {size:,} most frequent tokens; the others only the whole model says."
    return text


def _usage(name: str, setting: dict[str, Any]) -> str:
    if setting.get("exit_layer"):
        arguments, comment = "", "  # drafts as the checkpoint was tuned to"
    else:
        arguments, comment = (
            ", exit_layer=2, num_draft_tokens=4",
            "  # this checkpoint carries no tuned setting",
        )
    return f"""## How to use

An ordinary `transformers` checkpoint:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=64)
```

The same output by self-speculative decoding, with the `layerskip` library:

```python
import layerskip

output = layerskip.generate(model, **inputs, max_new_tokens=64{arguments}){comment}
```"""


def _recipe(recipe: dict[str, Any] | None, evaluation: dict[str, Any]) -> str:
    rows = [(f"`{name}`", _cell(value)) for name, value in (recipe or {}).items() if value is not None]
    rows += [(name, f"{evaluation[key]:,}") for key, name in _RUN_LENGTH.items() if evaluation.get(key)]
    return "## Recipe\n\n" + _table(("setting", "value"), rows) if rows else ""


_RUN_LENGTH = {"steps": "optimizer steps", "tokens": "training tokens"}


def _exits(carried: dict[str, Any] | None, evaluation: dict[str, Any]) -> str:
    test, earlier = ((evaluation.get(when) or {}).get("test") or {} for when in ("after", "before"))
    exits = test.get("exits") or carried or {}
    if not exits:
        return ""
    known = earlier.get("exits") or {}
    rows = [
        (exit_layer, *(_change(known.get(exit_layer), numbers, key) for key in ("loss", "agreement", "overlap")))
        for exit_layer, numbers in sorted(exits.items(), key=lambda item: int(item[0]))
    ]
    text = (
        "## Exits\n\nEvery exit on held-out text: its loss (nats a token), how often its most probable token "
        "is the whole model's (`agreement`: accepted when decoding greedily), and how much the two "
        "distributions share (`overlap`: accepted when sampling at temperature 1)"
        + ("; before → after training.\n\n" if earlier else ".\n\n")
    )
    after, before = _last_loss(evaluation, "after"), _last_loss(evaluation, "before")
    if after is not None:
        rows.append(("whole model", _change(earlier.get("last"), test["last"], "loss"), "1", "1"))
    text += _table(("layers run", "loss", "agreement", "overlap"), rows)
    if after is not None and before is not None:
        change = f"{after / before - 1:+.1%}"
        text += f"\n\nLoss of the whole model on that text: {before:.4f} before training, {after:.4f} after ({change})."
    return text


def _change(before: dict[str, Any] | None, after: dict[str, Any], key: str) -> str:
    """One number, with what it was before training, if that is known."""
    number = _cell(after.get(key))
    return f"{_cell(before[key])} → {number}" if before and key in before else number


def _speed(benchmark: dict[str, Any], evaluation: dict[str, Any]) -> str:
    modes = [mode for mode in ("greedy", "sampled") if benchmark.get(mode)]
    if not modes:
        return _forecast(evaluation)
    conditions = {name: value for name, value in benchmark.get("conditions", {}).items() if value is not None}
    parts = ["## Speed", "Measured, all ways of decoding side by side on the same prompts."]
    for mode in modes:
        rows = [_speed_row(arm) for arm in benchmark[mode]]
        parts.append(f"{mode.capitalize()}:\n\n" + _table(_SPEED_COLUMNS, rows))
    parts.append("Conditions: " + ", ".join(f"{name} {_cell(value)}" for name, value in conditions.items()) + ".")
    return "\n\n".join(parts)


_SPEED_COLUMNS = ("", "exit layer", "drafts", "tokens/s", "speedup", "tokens a verify step", "equal outputs")


def _speed_row(arm: dict[str, Any]) -> tuple[str, ...]:
    setting = (_cell(arm.get("exit_layer")), _cell(arm.get("drafts") or arm.get("num_draft_tokens")))
    if arm.get("error"):
        return (f"{arm['arm']} (failed)", *setting, "-", "-", "-", "-")
    equal = f"{arm['equal_outputs']} of {arm['num_outputs']}" if "equal_outputs" in arm else "-"
    numbers = ("tokens_per_second", "speedup", "mean_acceptance_length")
    return (arm["arm"], *setting, *(_cell(arm.get(key), 2) for key in numbers), equal)


def _forecast(evaluation: dict[str, Any]) -> str:
    setting = evaluation.get("setting") or {}
    forecast = setting.get("forecast")
    if not forecast:
        return ""
    known = evaluation.get("forecast_conditions") or {}
    conditions = ", ".join(f"{name} {_cell(value)}" for name, value in known.items())
    return (
        "## Speed\n\nNot measured yet. Forecast from acceptance on held-out text and the cost of each stage, "
        f"for exit layer {setting.get('exit_layer')} and {setting.get('num_draft_tokens')} drafted tokens: "
        f"{forecast['mean_acceptance_length']:.2f} tokens a verify step, {forecast['speedup']:.2f} times "
        f"plain decoding in the same loop ({conditions})."
    )


_LIMITS = """## Limits

Greedy output is the whole model's token for token in float32; in lower precision up to near-ties, where two
tokens are equally probable within rounding. Sampled output has the whole model's distribution. The gain
depends on the machine, the text and the batch size: measure it where it matters. What the model says has not
been checked for truth or safety."""


def _hub_id(settings: str, section: str, key: str) -> str | None:
    """A Hub id among a run's settings, or None: a local path is nobody else's business.

    config.yaml is written by a program, one setting a line, so that no YAML parser is needed to find one.
    """
    found = re.search(rf"^{section}:\n(?:  .*\n)*?  {key}: ['\"]?([^'\"\n]+)['\"]?$", settings, re.MULTILINE)
    name = found[1] if found else "null"
    looks_local = name == "null" or name.startswith((".", "~", "/")) or name.count("/") > 1
    return None if looks_local or Path(name).exists() else name


def _num_layers(config: dict[str, Any]) -> int | None:
    config = config.get("text_config") or config
    return config.get("num_hidden_layers") or config.get("n_layer")


def _last_loss(evaluation: dict[str, Any], when: str) -> float | None:
    loss: float | None = (((evaluation.get(when) or {}).get("test") or {}).get("last") or {}).get("loss")
    return loss


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file is not there.

    Raises:
        HubError: if it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HubError(f"{path} is not a JSON object: mend or remove it")
    return found


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any, digits: int = 4) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
