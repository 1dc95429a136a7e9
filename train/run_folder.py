"""The run folder: whose it is, what may be written into it, and how the run was started.

All processes of a run, on however many machines, must see it at the same path.

runs/quickstart/
  config.yaml provenance.json           the merged settings; every launch: argv, commit, versions; hashes of the data
  data/ tokenizer/ prompts/             packed tokens, the tokenizer, held-out prompts for the program `infer`
  checkpoints/step-000100/              what a resume needs
  metrics.jsonl evaluation.json         what was measured; costs.json: how long the stages take on this machine
  samples.jsonl report.html             what the model wrote at each evaluation; all of it for a person to read
  config.json model.safetensors ...     the finished checkpoint, an ordinary Hugging Face one
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerskip.checkpoint.whole_files import read_json, write_json, write_whole
from train.command import to_yaml
from train.config import TrainConfig
from train.disk import writing_alone
from train.errors import ConfigError, TrainingError
from train.parsing import read_yaml
from train.splits import SPLITS

# What a run writes: it refuses to write over these, and `run.overwrite` deletes these and nothing else.
OUTPUTS = (
    *(
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "evaluation.json",
        "README.md",
        "chat_template.jinja",
    ),
    *("samples.jsonl", "report.html", "costs.json"),
    *("data", "tokenizer", "prompts", "checkpoints", "wandb", "tensorboard"),
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors*",
        "tokenizer*",
        "special_tokens_map.json",
        "exit_adapters.safetensors",
        "draft_vocabulary.safetensors",
    ),
)
# Settings that may differ between a run and its resumption; all others make it another run.
_MAY_CHANGE = {
    "run": ("name", "output_dir", "resume", "overwrite", "cpu_threads"),
    "model": ("save_dtype", "gradient_checkpointing", "attn_implementation"),
    "data": ("evaluation_blocks", "draft_vocabulary"),
    "recipe": ("total_steps",),
    "optim": ("max_steps", "micro_batch_size"),
}
_FREE_SECTIONS = ("every", "best", "tracking", "hub")
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "deepspeed",
    "wandb",
)


def claim(config: TrainConfig, argv: Sequence[str]) -> None:
    """Make `config.run.folder` this run's: check whose it is, then write config.yaml and provenance.json.

    Called by the first process alone. Raises `TrainingError` if the folder holds another run (or any run,
    under `run.resume=never`) and `run.overwrite` is off, or files of the same names that no run wrote, or cannot be
    written.
    """
    folder = config.run.folder
    existing = list(dict.fromkeys(path for pattern in OUTPUTS for path in sorted(folder.glob(pattern))))
    if existing:
        reason = _reason_to_refuse(config, existing[0])
        if reason and not config.run.overwrite and not _never_stepped(folder):
            raise TrainingError(f"{reason}; choose another run.output_dir, or run.overwrite=true to delete it")
        if reason:
            for path in existing:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_settings(folder / "config.yaml", to_yaml(config))
        _record_launch(folder / "provenance.json", argv, config.run.seed)
    except OSError as error:
        raise TrainingError(
            f"cannot write the run folder {folder}: {error}; make room, or choose another run.output_dir"
        ) from None


def _write_settings(path: Path, text: str) -> None:
    """Write config.yaml, whole or not at all: cut off, it would say that the folder holds another run."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)


def _never_stepped(folder: Path) -> bool:
    """Whether a run of this program began here and failed before its first step, on a setting that did not fit:
    there is nothing to lose, and the corrected command may have the folder."""
    ours = all((folder / name).is_file() for name in ("config.yaml", "provenance.json"))
    trained = ("metrics.jsonl", "evaluation.json", "checkpoints/*", "model*.safetensors*", "config.json")
    return ours and not any(path for pattern in trained for path in folder.glob(pattern))


def _reason_to_refuse(config: TrainConfig, found: Path) -> str:
    """Why this run may not use a folder that holds `found`; empty if it is this very run, to be resumed."""
    folder = config.run.folder
    if not (folder / "config.yaml").is_file() or not (folder / "provenance.json").is_file():
        return f"{folder} holds {found.name}, but no run of this program"
    if config.run.resume == "never":
        return f"{folder} holds a run already, and run.resume=never"
    try:
        there = _identity(read_yaml(folder / "config.yaml"))
    except ConfigError as error:
        return f"{folder} holds a run whose settings cannot be read ({error})"
    here = _identity(_as_written(config))
    for key in {**there, **here}:
        if there.get(key) != here.get(key):
            return f"{folder} holds another run: {key} is {there.get(key)!r} there and {here.get(key)!r} here"
    return ""


def _as_written(config: TrainConfig) -> dict[str, Any]:
    """The settings as config.yaml will hold them: lists where dataclasses hold tuples."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return values


def _identity(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that make a run the run it is, by dotted name."""
    flat: dict[str, Any] = {}
    for section, content in values.items():
        if section not in _FREE_SECTIONS:
            kept = {k: v for k, v in (content or {}).items() if k not in _MAY_CHANGE.get(section, ())}
            flat.update({f"{section}.{key}": value for key, value in kept.items()})
    return flat


def record_data(folder: Path) -> None:
    """Note the fingerprint of what the run reads in provenance.json: a hash of the tokens of each split and of the
    tokenizer. Called by the first process alone, once they are there; a resumed run keeps what is noted."""
    path = folder / "provenance.json"
    record = read_json(path)
    if "data" in record:
        return
    splits = [file for split in SPLITS for file in sorted((folder / "data").rglob(f"{split}.bin"))]
    files = [*splits, *sorted((folder / "tokenizer").glob("tokenizer.json"))]
    record["data"] = {file.relative_to(folder).as_posix(): _fingerprint(file) for file in files}
    with writing_alone(path):
        write_json(path, record)


def _fingerprint(file: Path) -> str:
    with file.open("rb") as content:
        return "sha256:" + hashlib.file_digest(content, "sha256").hexdigest()


def _record_launch(path: Path, argv: Sequence[str], seed: int) -> None:
    """Append this launch to provenance.json; a new file gets the run's id (which wandb uses, too)."""
    record = read_json(path) or {"run_id": uuid.uuid4().hex[:8], "launches": []}
    record["launches"].append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "argv": list(argv),
            "seed": seed,
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
            "commit": git_commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        }
    )
    write_json(path, record)


def git_commit() -> str | None:
    """The checkout's commit, with `-dirty` if files differ from it; None outside a git checkout."""
    checkout = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
