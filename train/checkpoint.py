"""Checkpoints that are whole or ignored: written beside, flushed to disk, then renamed into place.

    checkpoints/step-000100/
      config.json model.safetensors tokenizer.json ...   an ordinary Hugging Face checkpoint
      config.yaml provenance.json                        where it comes from
      optimizer.pt, or engine/                           AdamW's state; for sharded engines all they need
      state.json                                         step and tokens, and the size of every file here

No state of random generators: each step seeds them from (seed, step, rank), see `step.py`.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from layerskip.checkpoint.vocabulary import save_draft_vocabulary
from train.disk import flush, flush_folder, writing
from train.engine import is_sharded
from train.errors import TrainingError
from train.lora import has_lora, merge_lora, save_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PARTIAL = ".partial"  # suffix of a checkpoint that is being written
_STATE = "state.json"
_STEP = re.compile(r"step-(\d+)")


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens trained on, over all processes


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def save_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: "PreTrainedTokenizerBase",
    progress: Progress,
    run_folder: Path,
    keep: int,
    keep_step: int | None = None,
) -> Path:
    """Save all that a resume needs, delete all but the newest `keep` checkpoints and the one of step `keep_step`;
    every process calls this.

    Returns the checkpoint's folder. A crash at any moment leaves the older checkpoints as they were. Raises
    `TrainingError` if it cannot be written (the disk is full); what was written of it is then gone.
    """
    final = _folder_of(run_folder, progress.step)
    partial = final.with_name(final.name + _PARTIAL)
    with writing(accelerator, partial):
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    save_model(accelerator, model, tokenizer, partial, for_resume=True)
    with writing(accelerator, partial, alone=is_sharded(accelerator)):
        if is_sharded(accelerator):
            accelerator.save_state(str(partial / "engine"))
        elif accelerator.is_main_process:
            torch.save(optimizer.state_dict(), partial / "optimizer.pt")
    with writing(accelerator, partial):
        if accelerator.is_main_process:
            for name in ("config.yaml", "provenance.json"):
                shutil.copy(run_folder / name, partial / name)
            _write_state(partial, progress)
            flush(partial)
            shutil.rmtree(final, ignore_errors=True)  # of an earlier, longer attempt at this run
            os.replace(partial, final)
            flush_folder(final.parent)
            _prune(final.parent, keep, keep_step)
    return final


def save_model(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    dtype: torch.dtype = torch.float32,
    for_resume: bool = False,
) -> None:
    """Write the model and tokenizer as an ordinary Hugging Face checkpoint, and `for_resume` what LoRA needs besides;
    every process calls this.

    Raises `TrainingError` if it cannot be written, with `folder` removed.
    """
    weights = accelerator.get_state_dict(model)  # gathered on the first process if sharded
    with writing(accelerator, folder):
        if accelerator.is_main_process:
            inner: PreTrainedModel = accelerator.unwrap_model(model)
            if has_lora(inner):
                if for_resume:
                    save_lora(weights, folder)
                weights = merge_lora(weights, inner)
            _write_model(inner, weights, tokenizer, folder, dtype)


def _write_model(
    inner: "PreTrainedModel",
    weights: dict[str, torch.Tensor],
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    dtype: torch.dtype,
) -> None:
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    inner.save_pretrained(folder, state_dict=weights)  # and exit adapters, where the recipe trains some
    save_draft_vocabulary(inner, folder)  # where the model came with one
    tokenizer.save_pretrained(folder)
    if dtype != torch.float32:  # config.json says which dtype the weights are in
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole checkpoint, or None. Half-written ones are passed over."""
    return next(filter(_is_whole, reversed(_by_step(checkpoints_folder(run_folder)))), None)


def half_written(run_folder: Path) -> list[Path]:
    """Checkpoints that a crash, or a copy that was cut short, left in pieces; the next one saved clears them away."""
    return [folder for folder in _by_step(checkpoints_folder(run_folder)) if not _is_whole(folder)]


def whole_checkpoint(run_folder: Path, step: int) -> Path | None:
    """The checkpoint of one step, or None if it is not there or not whole."""
    folder = _folder_of(run_folder, step)
    return folder if _is_whole(folder) else None


def read_progress(checkpoint: Path) -> Progress:
    """The step and token count of a whole checkpoint."""
    state = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    return Progress(step=state["step"], tokens=state["tokens"])


def load_training_state(accelerator: Accelerator, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load what the model's own weights do not hold: the optimizer, or for sharded engines their whole state.

    Raises `TrainingError` if the checkpoint was written by the other kind of engine.
    """
    sharded = is_sharded(accelerator)
    wanted = checkpoint / ("engine" if sharded else "optimizer.pt")
    if not wanted.exists():
        kind = "without" if sharded else "with"
        raise TrainingError(
            f"{checkpoint} was written {kind} DeepSpeed or FSDP; resume with the same kind of --config_file"
        )
    if sharded:
        accelerator.load_state(str(wanted))
    else:
        optimizer.load_state_dict(torch.load(wanted, map_location="cpu", weights_only=True))


def _folder_of(run_folder: Path, step: int) -> Path:
    return checkpoints_folder(run_folder) / f"step-{step:06d}"


def _by_step(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, whole or not, oldest first."""
    numbered = [(int(digits[1]), path) for path in folder.glob("step-*") if (digits := _STEP.match(path.name))]
    return [path for _, path in sorted(numbered)]


def _write_state(folder: Path, progress: Progress) -> None:
    """Write state.json, last: it lists every other file with its size in bytes."""
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    state = {**asdict(progress), "files": files}
    (folder / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    """Whether the folder has its final name and all files at full size (a copy may be interrupted)."""
    if folder.name.endswith(_PARTIAL):
        return False
    try:
        files = json.loads((folder / _STATE).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _prune(folder: Path, keep: int, keep_step: int | None = None) -> None:
    """Delete half-written checkpoints and all but the newest `keep` whole ones and the one of `keep_step`."""
    checkpoints = _by_step(folder)
    whole = [path for path in checkpoints if _is_whole(path)]
    for path in checkpoints:
        if path not in whole[-keep:] and not (path in whole and path.name == f"step-{keep_step or 0:06d}"):
            shutil.rmtree(path, ignore_errors=True)
