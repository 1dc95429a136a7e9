"""Training a low-rank update instead of all weights (LoRA, by PEFT), merged whenever a checkpoint is written.

PEFT puts its layers into the model itself, which stays the model it was for everything else: stages, recipe,
generation. A checkpoint holds the merged, ordinary weights, and the update apart (`lora.safetensors`) for a resume.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from train.errors import ConfigError, TrainingError, first_line
from train.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LORA_FILE = "lora.safetensors"
_NAME = "default"  # PEFT's own name for an only adapter


def check_lora(config: ModelConfig) -> None:
    """Raise `ConfigError` if LoRA is asked for and PEFT is not there."""
    if config.lora_rank is None:
        return
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ConfigError(f"model.lora_rank is {config.lora_rank}, which needs PEFT: pip install peft") from None


def add_lora(model: "PreTrainedModel", config: ModelConfig, seed: int, checkpoint: Path | None) -> None:
    """Freeze `model` and put a trainable low-rank update beside its linear layers, that of `checkpoint` if given.

    Raises `ConfigError` if none of `lora_targets` is a layer of the model, or the rank is beyond that of any layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(config.lora_targets) or _linear_layers(model)
    _check_rank(config.lora_rank or 0, model)
    alpha = config.lora_alpha if config.lora_alpha is not None else 2 * (config.lora_rank or 0)
    torch.manual_seed(seed)
    try:
        lora = LoraConfig(r=config.lora_rank or 0, lora_alpha=alpha, target_modules=targets)
        inject_adapter_in_model(lora, model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"model.lora_targets {config.lora_targets}: {first_line(error)}") from None
    if checkpoint:
        load_lora(model, checkpoint)


def _check_rank(rank: int, model: "PreTrainedModel") -> None:
    """A higher rank than a layer's own changes nothing but the memory it takes. Shapes of ZeRO-3 are not known."""
    full = max((min(model.get_submodule(name).weight.shape, default=0) for name in _linear_layers(model)), default=0)
    if full and rank > full:
        raise ConfigError(f"model.lora_rank is {rank}; no layer of this model has a rank above {full}: lower it")


def _linear_layers(model: "PreTrainedModel") -> list[str]:
    """Names of all linear layers but the head (of experts, only those that are layers of their own)."""
    head = model.get_output_embeddings()
    kinds = (torch.nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]


def load_lora(model: "PreTrainedModel", checkpoint: Path) -> None:
    """Give the model the update that a checkpoint holds. `TrainingError` if it holds none."""
    path = checkpoint / LORA_FILE
    if not path.is_file():
        raise TrainingError(f"{checkpoint} was trained without model.lora_rank; resume it without, or start a new run")
    model.load_state_dict(load_file(path), strict=False)


def merge_lora(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The ordinary weights in a state dict of `model`: W + alpha/r B A, under the names of a model without LoRA.

    `weights` may have been gathered from shards; of the model only the shape of things is asked.
    """
    updated = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    merged = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        place, found, rest = name.partition(".base_layer.")
        if found and rest == "weight":
            layer: Any = updated[place]
            a, b = (weights[f"{place}.lora_{part}.{_NAME}.weight"].float() for part in "AB")
            update = layer.scaling[_NAME] * (b @ a)
            weight = weight + (update.T if layer.fan_in_fan_out else update).to(weight.dtype)  # GPT-2's are transposed
        merged[f"{place}.{rest}" if found else name] = weight
    return merged


def has_lora(model: torch.nn.Module) -> bool:
    """Whether LoRA layers were put into the model."""
    return any(hasattr(module, "lora_A") for module in model.modules())


def save_lora(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the update alone."""
    save_file({n: w.detach().cpu().contiguous() for n, w in weights.items() if ".lora_" in n}, folder / LORA_FILE)
