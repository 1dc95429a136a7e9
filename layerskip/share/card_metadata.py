"""The model card's metadata, as the Hub reads it: tags, base model, licence, results."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache

from layerskip.share.run_record import RunRecord, local_folder

_TAGS = ["layerskip", "self-speculative-decoding", "speculative-decoding", "early-exit"]
_LICENCE = ("license", "license_name", "license_link")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def metadata(
    run: RunRecord, model_name: str, license: str | None = None, base_model: str | None = None
) -> ModelCardData:
    """What the Hub indexes: licence and base model as given, as an earlier card of the run said, or as they are known.

    The licence is inherited from the base model's card if that lies beside it: in its folder, or in the Hub's cache.
    """
    name = (run.settings.get("model") or {}).get("name_or_path")
    earlier, base = read_card(run.folder / "README.md"), _card_of(name, run.folder)
    licence: dict[str, Any] = (
        {"license": license} if license else next((kept for kept in map(_licence, (earlier, base)) if kept), {})
    )
    return ModelCardData(
        language=base.get("language"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=_TAGS,
        base_model=base_model or hub_id(name, run.folder) or earlier.get("base_model"),
        datasets=data_sets(run) or None,
        model_name=model_name,
        eval_results=eval_results(run) or None,
        **licence,
    )


def hub_id(name: Any, run_dir: Path) -> str | None:
    """A setting that names something on the Hub, or None: a local path is nobody else's business."""
    is_id = isinstance(name, str) and _HUB_ID.fullmatch(name) is not None and local_folder(name, run_dir) is None
    return name if is_id else None


def sources(run: RunRecord) -> list[dict[str, Any]]:
    """The sources of the training text: the settings' `data`, or its mixture."""
    data = run.settings.get("data") or {}
    return [source for source in data.get("sources") or [data] if source]


def data_sets(run: RunRecord) -> list[str]:
    """The Hub ids of the data sets it learnt from, each once."""
    return list(dict.fromkeys(name for source in sources(run) if (name := hub_id(source.get("dataset"), run.folder))))


def eval_results(run: RunRecord) -> list[EvalResult]:
    """The last layer's perplexity and each exit's agreement with it on held-out text, and the measured speedups."""
    names = data_sets(run)
    about: dict[str, Any] = {
        "task_type": "text-generation",
        "dataset_type": names[0] if len(names) == 1 else "held-out",
        "dataset_name": f"held-out text of {names[0] if len(names) == 1 else 'the run'}",
        "dataset_split": run.split,
    }
    results = []
    loss = run.last_loss("after")
    if loss is not None:
        results.append(
            EvalResult(**about, metric_type="perplexity", metric_value=math.exp(loss), metric_name="perplexity")
        )
    for exit_layer, numbers in (run.measured("after").get("exits") or {}).items():
        if numbers.get("agreement") is not None:
            name = f"greedy agreement of exit layer {exit_layer} with the last layer"
            results.append(
                EvalResult(**about, metric_type="accuracy", metric_value=numbers["agreement"], metric_name=name)
            )
    about |= {"dataset_type": "prompts", "dataset_name": "the benchmark's prompts", "dataset_split": None}
    for mode in ("greedy", "sampled"):
        arms = [arm for arm in run.benchmark.get(mode) or [] if arm.get("exit_layer") and arm.get("speedup")]
        for arm in (arm for arm in arms if not arm["arm"].startswith("assistant")):  # transformers' own way
            name = f"speedup of {arm['arm']} over plain decoding, {mode}"
            results.append(EvalResult(**about, metric_type="speedup", metric_value=arm["speedup"], metric_name=name))
    return results


def read_card(path: Path) -> ModelCardData:
    """The metadata of a card; empty if there is none, or none that can be read."""
    try:
        if path.is_file() and path.read_text(encoding="utf-8").startswith("---"):
            return ModelCard.load(path, ignore_metadata_errors=True).data
    except Exception:  # of a YAML library that is not ours to import: somebody's card, which is not ours to mend
        pass
    return ModelCardData()


def _card_of(name: Any, run_dir: Path) -> ModelCardData:
    """The base model's metadata, if its card lies in its folder or, for a Hub id, in the cache."""
    if (folder := local_folder(name, run_dir)) is not None:
        return read_card(folder / "README.md")
    cached = try_to_load_from_cache(name, "README.md") if hub_id(name, run_dir) else None
    return read_card(Path(cached)) if isinstance(cached, str) else ModelCardData()


def _licence(card: ModelCardData) -> dict[str, str]:
    return {key: value for key in _LICENCE if (value := card.get(key))} if card.get("license") else {}
