"""The early-exit loss: J = sum over active exits of e~(t, l) CE(g(x_{l+1}), Y)  (paper, 4.1.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from layerskip.training.objective import IGNORE_INDEX
from layerskip.training.recipe import Recipe


def exit_scale(recipe: Recipe, exit_layer: int, num_layers: int) -> float:
    """e(l), the weight of an exit before normalisation; l = exit_layer - 1.

    Paper: e_scale l(l+1)/2 for l < L-1, and (L-1) + e_scale (L-2)(L-1)/2 for the last layer.
    Uniform: exit_loss_scale for every early exit, 1 for the last layer.
    Shallow: 1 for the last layer, and exit_loss_scale (L-E)/(L-1) for exit E: all of it at the first, the shallowest
    drafts being the ones that save most, falling towards the last.
    """
    scale, l = recipe.exit_loss_scale, exit_layer - 1
    if recipe.exit_weights != "paper":
        falling = (num_layers - exit_layer) / (num_layers - 1) if recipe.exit_weights == "shallow" else 1.0
        return 1.0 if exit_layer == num_layers else scale * falling
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
