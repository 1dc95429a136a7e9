"""The model card's words: what the model is, how to use it, how it was made, what it does not do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCardData

from layerskip.share.card_metadata import hub_id, sources
from layerskip.share.run_record import RunRecord, setting_in_words


def introduction(name: str, run: RunRecord, base_model: Any) -> str:
    """The title, what it is, from what, and the tuned setting."""
    base_models = [base_model] if isinstance(base_model, str) else base_model or []
    links = ", ".join(f"[{base}](https://huggingface.co/{base})" for base in base_models)
    given = (run.settings.get("model") or {}).get("name_or_path")
    local = f", from a local copy of {last_part(given)}" if given and not hub_id(given, run.folder) else ""
    origin = f", from {links}" if links else local
    text = (
        f"# {name.rpartition('/')[2]}\n\n"
        f"A language model that drafts for itself, trained with LayerSkip{origin}: its early layers predict "
        "well enough to propose tokens, and the remaining layers verify them, several in one pass. The "
        "output is that of the whole model. There is one set of weights and no second model to load."
    )
    if run.setting and run.num_layers:
        text += f" Tuned setting: {setting_in_words(run.setting, run.num_layers)}."
    size = (run.layerskip.get("draft_vocabulary") or {}).get("size")
    if size:
        text += f" The draft's head knows the {size:,} most frequent tokens; the others only the whole model says."
    if run.evaluation.get("unfinished"):
        text += (
            f"\n\n**This is the checkpoint of step {run.evaluation.get('steps'):,} of a run that is still going on.**"
        )
    return text


_TRANSFORMERS = """## How to use

An ordinary `transformers` checkpoint:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

The same output by self-speculative decoding, with the `layerskip` library (`pip install layerskip-kit`):

```python
import layerskip

output = layerskip.generate(model, **inputs, max_new_tokens=64{drafting}
```"""
_OWN_CODE = """The checkpoint brings code that does so by itself (it imports the same library), if it is trusted:

```python
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
output = model.generate(**inputs, max_new_tokens=64)  # drafts, and verifies
```"""
_SERVER = """Behind an OpenAI-compatible server (`pip install 'transformers[serving]'`):

```sh
transformers serve {name}{trust}
```"""


def usage(name: str, run: RunRecord) -> str:
    """Three ways, or four: transformers, layerskip, the checkpoint's own code, a server."""
    drafting = ")  # drafts as the checkpoint was tuned to"
    if not run.setting.get("exit_layer") and run.setting.get("lookup") != "only":
        exit_layer = next(iter(run.layerskip.get("exits") or {}), "2")
        said = "is tuned to plain decoding" if run.setting else "carries no tuned setting"
        drafting = f", exit_layer={exit_layer}, num_draft_tokens=4)  # this checkpoint {said}"
    parts = [_TRANSFORMERS.format(name=name, drafting=drafting)]
    if run.custom_generate:
        parts.append(_OWN_CODE.format(name=name))
    parts.append(_SERVER.format(name=name, trust=" --trust-remote-code" if run.custom_generate else ""))
    return "\n\n".join(parts)


def training_data(run: RunRecord) -> str:
    """What it learnt from; of local files the names alone."""
    data = run.settings.get("data") or {}
    lines = [f"* {line}" for source in sources(run) for line in _source(source, run)]
    if not lines:
        return ""
    facts = []
    if data.get("held_out"):
        facts.append(f"{data['held_out']:.0%} of it was held out for the numbers below")
    if data.get("sequence_length"):
        facts.append(f"it was cut into {data['sequence_length']:,} tokens a sequence")
    if data.get("own_text"):
        facts.append(f"in the last {data['own_text']:.0%} of the steps the exits followed what the model itself writes")
    said = "; ".join(facts)
    return "## Data\n\n" + "\n".join(lines) + (f"\n\n{said[0].upper()}{said[1:]}." if said else "")


def _source(source: dict[str, Any], run: RunRecord) -> list[str]:
    is_mixture = bool((run.settings.get("data") or {}).get("sources"))
    weight = f", weight {source['weight']:g}" if is_mixture and source.get("weight") is not None else ""
    lines = ["the standard library of a Python installation"] if source.get("standard_library") else []
    paths = source.get("path") or []
    lines += [f"local text: {last_part(path)}" for path in ([paths] if isinstance(paths, str) else paths)]
    if dataset := source.get("dataset"):
        subset = f", {source['subset']}" if source.get("subset") else ""
        known = hub_id(dataset, run.folder)
        link = f"[{known}](https://huggingface.co/datasets/{known})" if known else f"local data: {last_part(dataset)}"
        lines.append(f"{link}{subset}, split {source.get('split') or 'train'}")
    return [line + weight for line in lines]


def recipe(run: RunRecord) -> str:
    """Every training choice, and how long it was."""
    rows = [
        (f"`{name}`", cell(value)) for name, value in (run.layerskip.get("recipe") or {}).items() if value is not None
    ]
    optim = run.settings.get("optim") or {}
    rows += [(f"`optim.{name}`", cell(optim[name])) for name in _OPTIM if optim.get(name) is not None]
    rows += [(name, f"{run.evaluation[key]:,}") for key, name in _RUN_LENGTH.items() if run.evaluation.get(key)]
    return "## Recipe\n\n" + table(("setting", "value"), rows) if rows else ""


_OPTIM = ("learning_rate", "schedule", "warmup_steps", "global_batch_size", "weight_decay")
_RUN_LENGTH = {"steps": "optimizer steps", "tokens": "training tokens"}

LIMITS = """## Limits

Greedy output is the whole model's token for token in float32; in lower precision up to near-ties, where two
tokens are equally probable within rounding. Sampled output has the whole model's distribution. The gain
depends on the machine, the text and the batch size: measure it where it matters. What the model says has not
been checked for truth or safety."""


def licence(data: ModelCardData) -> str:
    """Under what it is shared, or that nobody has said so."""
    if data.license:
        named = data.get("license_name") or data.license
        link = data.get("license_link")
        return f"## Licence\n\n{f'[{named}]({link})' if link else named}"
    return (
        "## Licence\n\nNo licence was named: without one, nobody else has the right to use or to share this model. "
        "A model that was trained on from another keeps to that one's licence."
    )


def last_part(path: str) -> str:
    """The last part of a path: where it lies on somebody's disk is nobody else's business."""
    return PurePath(path.replace("\\", "/")).name or path


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any, digits: int = 4) -> str:
    """One value in a table, numbers to at most so many digits after the point; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        value = (
            f"{value:.{digits}f}".rstrip("0").rstrip(".") if value == 0 or abs(value) >= 10**-digits else f"{value:g}"
        )
    return str(value).replace("|", "\\|")
