"""The early-exit loss: J = sum over active exits of e~(t, l) CE(g(x_{l+1}), Y)  (paper, 4.1.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerskip.recipe import Recipe

IGNORE_INDEX = -100


def exit_scale(recipe: Recipe, exit_layer: int, num_layers: int) -> float:
    """e(l), the weight of an exit before normalisation; l = exit_layer - 1.

    Paper: e_scale l(l+1)/2 for l < L-1, and (L-1) + e_scale (L-2)(L-1)/2 for the last layer.
    Uniform: exit_loss_scale for every early exit, 1 for the last layer.
    """
    scale, l = recipe.exit_loss_scale, exit_layer - 1
    if recipe.exit_weights == "uniform":
        return 1.0 if exit_layer == num_layers else scale
    if exit_layer == num_layers:
        return l + scale * l * (l - 1) / 2
    return scale * l * (l + 1) / 2


def exit_weights(recipe: Recipe, active: Sequence[int], num_layers: int) -> dict[int, float]:
    """e~(t, l) of the active exits: e(l) divided by their sum.

    Where all are zero (the paper's e(0) is), the active exits share the loss equally rather than divide by zero.
    """
    scales = {exit_layer: exit_scale(recipe, exit_layer, num_layers) for exit_layer in active}
    total = sum(scales.values())
    if total == 0:
        return {exit_layer: 1 / len(scales) for exit_layer in scales}
    return {exit_layer: scale / total for exit_layer, scale in scales.items()}


def shifted_labels(labels: Tensor) -> Tensor:
    """Labels of what each position predicts: (batch, length), the last column ignored."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def soft_cross_entropy(
    logits: Tensor, target_logits: Tensor, targets: Tensor, num_items: Tensor | int | None
) -> Tensor:
    """-sum p log q, p = softmax(target_logits) detached, over positions whose target is not ignored.

    Args:
        logits, target_logits: (batch, length, vocab).
        targets: (batch, length) what each position predicts; only which are ignored matters.
        num_items: divisor, as transformers counts it over an accumulation window; None: the mean.
    """
    counted = targets != IGNORE_INDEX  # (batch, length)
    log_q = logits[counted].float().log_softmax(dim=-1)  # (counted, vocab)
    p = target_logits.detach()[counted].float().softmax(dim=-1)
    total = -(p * log_q).sum()
    if num_items is None:
        return total / counted.sum().clamp(min=1)
    return total / torch.as_tensor(num_items, device=total.device)
