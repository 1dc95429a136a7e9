"""From settings to a run that can step: folder, engine, data, model, optimizer, checkpoint."""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from huggingface_hub import get_token, is_offline_mode

import layerskip
from layerskip.checkpoint.vocabulary import draft_vocabulary_of
from layerskip.model.adapters import adapters_of, drop_other_adapters
from layerskip.model.anatomy import num_layers
from train import run_folder
from train.architecture import build_model_config, fit_vocabulary
from train.boundaries import why_not_apart
from train.checkpoint import Progress, latest_checkpoint, load_training_state, read_progress
from train.config import TrainConfig
from train.data import Data, open_data, prepare_data
from train.engine import accumulation_steps, autocast, build_accelerator, is_sharded
from train.errors import ConfigError, TrainingError
from train.evaluate import Evaluator
from train.lora import add_lora, check_lora
from train.model import build_model, compile_layers, decide_dtypes
from train.optim import build_optimizer
from train.trackers import check_trackers
from train.vocabulary import check_draft_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerskip.training.handle import Handle


@dataclass(frozen=True)
class Run:
    """All that the loop works with."""

    config: TrainConfig
    accelerator: Accelerator
    data: Data
    model: torch.nn.Module  # as the engine wrapped it
    handle: "Handle"  # the recipe at work on the model
    optimizer: torch.optim.Optimizer
    evaluator: Evaluator
    progress: Progress  # counted up by the loop
    resumed: Path | None  # the checkpoint the run goes on from


def set_up(config: TrainConfig, argv: Sequence[str]) -> Run:
    """Check, load and wrap everything; each thing is checked before the next, heavier one is made.

    Raises `ConfigError` and `TrainingError`, see there.
    """
    accumulation_steps(config, int(os.environ.get("WORLD_SIZE", 1)))
    if os.environ.get("RANK", "0") == "0":
        _check_services(config)
        run_folder.claim(config, argv)
    config = decide_dtypes(config)  # after the claim: a resume may be on another machine
    accelerator = build_accelerator(config)
    if config.recipe.reference_weight and is_sharded(accelerator):
        raise ConfigError(
            f"recipe.reference_weight is {config.recipe.reference_weight:g}: the original model it needs would not be "
            "sharded; launch with ddp.yaml, or set it to 0"
        )
    _quiet_libraries(accelerator.is_main_process)

    model_config = build_model_config(config)
    if accelerator.is_main_process:
        prepare_data(config)
        run_folder.record_data(config.run.folder)
    accelerator.wait_for_everyone()
    data = open_data(config)
    fit_vocabulary(model_config, data.tokenizer, config)
    check_draft_vocabulary(config, data.tokenizer)

    resumed = latest_checkpoint(config.run.folder)
    model = build_model(config, model_config, resumed)
    # A resumed model has moved on from its original, unless what moved is a LoRA that can be switched off.
    moved = config.recipe.reference_weight and resumed and not config.model.lora_rank
    reference = build_model(config, model_config, None) if moved else None
    evaluator, handle = _hang_recipe(accelerator, model, config, resumed, reference)
    optimizer = build_optimizer(model, config.optim)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    if resumed:
        load_training_state(accelerator, optimizer, resumed)
    data = _keep_apart(data, wrapped, accelerator, config)
    progress = read_progress(resumed) if resumed else Progress()
    return Run(config, accelerator, data, wrapped, handle, optimizer, evaluator, progress, resumed)


def _check_services(config: TrainConfig) -> None:
    """Raise `ConfigError` now for what would fail after the training: a name, or a key to log in with."""
    check_trackers(config.tracking)
    check_lora(config.model)
    if config.hub.repo:
        if get_token() is None:
            raise ConfigError("hub.repo is set, but there is no token: run `hf auth login`, or leave it out")
        if is_offline_mode():
            raise ConfigError("hub.repo is set, and HF_HUB_OFFLINE too: unset that, or leave hub.repo out")


def _hang_recipe(
    accelerator: Accelerator,
    model: "PreTrainedModel",
    config: TrainConfig,
    resumed: Path | None,
    reference: "PreTrainedModel | None",
) -> "tuple[Evaluator, Handle]":
    """Time the bare model's stages, then hang the recipe on it. `TrainingError` if it has no stages."""
    recipe = config.recipe
    drop_other_adapters(model, recipe.trained_exits(num_layers(model)), recipe.adapter_rank, recipe.adapter_blocks)
    try:
        adapters_of(model)
        draft_vocabulary_of(model)  # now: what it resumed from may be pruned by the time it is saved
    except (OSError, ValueError) as error:
        raise TrainingError(str(error)) from None
    try:
        evaluator = Evaluator(accelerator, model, config)
        if config.model.lora_rank:
            add_lora(model, config.model, config.run.seed, resumed)
        handle = layerskip.prepare(model, config.recipe, reference)
        if config.model.compile:
            compile_layers(model)
        return evaluator, handle
    except layerskip.UnsupportedModelError as error:
        raise TrainingError(str(error)) from None


def _keep_apart(data: Data, model: torch.nn.Module, accelerator: Accelerator, config: TrainConfig) -> Data:
    """The data, without boundaries where the model cannot keep to them and nobody asked for them by name.

    Raises `ConfigError` if `data.respect_boundaries` is true, and the model cannot.
    """
    reason = ""
    if data.has_boundaries:
        with autocast(accelerator, config):
            reason = why_not_apart(model, min(2, config.optim.micro_batch_size), accelerator.device)
    if not reason:
        return data
    if config.data.respect_boundaries:
        raise ConfigError(
            f"data.respect_boundaries is true, but {reason}: set model.attn_implementation to sdpa or eager, "
            "or data.respect_boundaries=false"
        )
    note = f"conversations in one block see each other: {reason}"
    apart = open_data(config, has_boundaries=False)
    return dataclasses.replace(apart, notes=(*apart.notes, note))


def _quiet_libraries(main: bool) -> None:
    """No bars of transformers between our lines, and nothing at all from the other processes but errors."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not main:
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")
