"""AdamW, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from train.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig) -> float:
    """The rate of optimizer step `step` (0 … max_steps − 1).

    Warm-up is linear and never 0, so that the first step already trains: (step + 1) / (warmup_steps + 1) of
    the peak. The peak is reached at step `warmup_steps`; the last step has `min_learning_rate` of it.
    """
    peak = optim.learning_rate
    if step < optim.warmup_steps:
        return peak * (step + 1) / (optim.warmup_steps + 1)
    if optim.schedule == "constant":
        return peak
    progress = min(1.0, (step - optim.warmup_steps) / max(1, optim.max_steps - 1 - optim.warmup_steps))
    fall = progress if optim.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return peak * (1 - (1 - optim.min_learning_rate) * fall)


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters; weight decay on matrices, none on norms and biases (1-D)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if _dimensions(p) > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=optim.betas, fused=True)


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter: ZeRO-3 leaves an empty 1-D tensor and notes the shape beside it."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the rate of all parameter groups of an optimizer."""
    for group in groups:
        group["lr"] = rate
