"""Recipes by name: the paper's (arXiv 2404.16710, section 5, tables 8 and 9), others', and the kit's own.

The paper's learning rates and batch sizes are in `configs/`. What is not named here is Recipe's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Continual pretraining of Llama 2 and 3; e_scale is 0.2 for 7B and 0.1 for 13B, Llama 3 8B and 3.2 1B.
    "paper-continual": {
        "max_dropout": 0.1,
        "dropout_time": "constant",
        "exit_loss_scale": 0.2,
        "exit_weights": "paper",
        "curriculum": "rotational",
        "curriculum_stride": 8,
        "exit_loss_positions": 1.0,
        "self_distillation": 0.0,
    },
    # From scratch: dropout rises over the run and each step trains one or two exits (R = L - 1). The paper raises the
    # learning rate too (4e-4 to 8e-4 at 1.5B), and p_max to 0.2 at 7B.
    "paper-scratch": {
        "max_dropout": 0.1,
        "dropout_time": "rising",
        "exit_loss_scale": 0.2,
        "exit_weights": "paper",
        "curriculum": "rotational",
        "curriculum_stride": None,
        "exit_loss_positions": 1.0,
        "self_distillation": 0.0,
    },
    # Finetuning Llama 1 7B on code: a narrow domain stands the full e_scale.
    "paper-finetune": {
        "max_dropout": 0.1,
        "dropout_time": "constant",
        "exit_loss_scale": 1.0,
        "exit_weights": "paper",
        "curriculum": "rotational",
        "curriculum_stride": 16,
        "exit_loss_positions": 1.0,
        "self_distillation": 0.0,
    },
    # Finetuning a 1.5B model on one task (TOPv2).
    "paper-finetune-task": {
        "max_dropout": 0.2,
        "dropout_time": "constant",
        "exit_loss_scale": 1.0,
        "exit_weights": "paper",
        "curriculum": "gradual",
        "exit_loss_positions": 1.0,
        "self_distillation": 0.0,
    },
    # Elhoushi et al. 2026 (arXiv 2609.05275): much dropout, linear in depth, falling over time, rescaled, and no exit
    # loss at all. It saves training time; exits come out weaker than trained ones.
    "dont-drop-dropout": {
        "max_dropout": 0.6,
        "dropout_depth": "linear",
        "dropout_time": "falling",
        "dropout_rescale": True,
        "exit_loss_scale": 0.0,
        "exit_weights": "uniform",
        "self_distillation": 0.0,
    },
    # What won `scripts/ablation.py` among recipes that add no weights: Recipe's defaults, by a name that stays.
    "self-distill": {
        "max_dropout": 0.1,
        "exit_loss_scale": 0.5,
        "exit_weights": "shallow",
        "exit_loss_positions": 0.25,
        "curriculum": "rotational",
        "curriculum_stride": 2,
        "self_distillation": 0.5,
    },
    # Nothing of the model changes: its output stays bit for bit what it was. Its first layer and two blocks learn to
    # draft: layers that learn nothing else draft better than as many of the model's.
    "frozen-target": {
        "max_dropout": 0.0,
        "exits": (1,),
        "exit_weights": "uniform",
        "curriculum": "all",
        "exit_loss_positions": 1.0,
        "self_distillation": 1.0,
        "adapter_blocks": 2,
        "freeze_model": True,
    },
}


def preset_values(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a preset with `changes` on top; one kind of adapter takes the other's place.

    Raises:
        KeyError: if there is none of that name.
    """
    kept = dict(PRESETS[name])
    if changes.get("adapter_rank") is not None:
        kept.pop("adapter_blocks", None)
    return {**kept, **changes}
