"""The model to train, loaded or made, and the arithmetic it runs in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from layerskip.model.anatomy import decoder_layers
from layerskip.model.machine import fast_dtype
from train.architecture import attention_choice
from train.config import TrainConfig
from train.errors import TrainingError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_model(config: TrainConfig, model_config: "PretrainedConfig", checkpoint: Path | None) -> "PreTrainedModel":
    """The model in float32, in training mode: from `checkpoint` if given, else as `config.model` says.

    Weights from scratch depend on `run.seed` alone, but that ZeRO-3 draws them in pieces, and so others.
    """
    # LoRA's own weights are put on top of the original later.
    source = (None if config.model.lora_rank else checkpoint) or config.model.name_or_path
    if source is None:
        torch.manual_seed(config.run.seed)
    model = load_model(config, model_config if source is None else str(source), torch.float32)
    if config.model.gradient_checkpointing:
        # Renamed in transformers 5.24; the old name warns there.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def load_model(config: TrainConfig, source: "str | PretrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    """The causal LM of a folder or Hub repository, or one with new weights from a transformers config.

    Raises `TrainingError` if it cannot be made.
    """
    from transformers import AutoModelForCausalLM

    attention = attention_choice(config.model)
    try:
        if isinstance(source, str):
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **attention)
        return AutoModelForCausalLM.from_config(source, dtype=dtype, **attention)
    except (OSError, ValueError, ImportError) as error:
        name = source if isinstance(source, str) else f"model.architecture ({source.model_type})"
        raise TrainingError(f"cannot build the model from {name!r}: {first_line(error)}") from None


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode for as long as the block runs, then as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def this_device() -> torch.device:
    """The accelerator of this machine, else its CPU."""
    return (torch.accelerator.is_available() and torch.accelerator.current_accelerator()) or torch.device("cpu")


def decide_dtypes(config: TrainConfig) -> TrainConfig:
    """The config with `model.dtype` and `model.save_dtype` of "auto" decided for this machine."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if fast_dtype(this_device()) == torch.bfloat16 else "float32"
    saved = dtype if config.model.save_dtype == "auto" else config.model.save_dtype
    return replace(config, model=replace(config.model, dtype=dtype, save_dtype=saved))


def compile_layers(model: "PreTrainedModel") -> None:
    """Have torch compile what every decoder layer computes, rows and lengths left open.

    Layer by layer and below the recipe's hooks, which stay as they are: they take rows out of the batch by number,
    which a compiled graph of the whole model could not hold.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]
