"""An exit adapter as one more decoder layer, so that plain weights hold it.

The adapter's  x + up(silu(down(rms(x))))  cannot be multiplied into the norm or the head: it bends. But it is what a
gated MLP with biases computes,

    x + down_proj(silu(gate_proj(n)) * up_proj(n)),   n = norm(x),   up_proj(n) = 0 n + 1,

in a layer whose attention adds nothing. Only for layers of that kind: the names are theirs, and whoever folds checks
the result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from layerskip.model.anatomy import UnsupportedModelError
from layerskip.model.exit_layers import ExitAdapter

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def fold_adapter(layers: Sequence[nn.Module], adapter: ExitAdapter, config: PreTrainedConfig) -> list[nn.Module]:
    """Copies of a draft's `layers`, and a further one that computes its adapter; sets `config.mlp_bias`.

    Exact but for the norm's epsilon: the adapter's is the dtype's, the layer's is the model's.

    Args:
        config: the text config that the copies will be loaded with.

    Raises:
        UnsupportedModelError: if the layers are not of the kind.
    """
    rank = adapter.down.weight.shape[0]
    _refuse_other_layers(layers[-1], rank, config)
    config.mlp_bias = True
    folded = [copy.deepcopy(layer) for layer in [*layers, layers[-1]]]
    for layer in folded:
        for name in _PROJECTIONS:
            _add_bias(layer.mlp.get_submodule(name))  # type: ignore[union-attr]
    extra = folded[-1]
    for name, parameter in extra.named_parameters():
        parameter.fill_(1.0 if name.endswith("layernorm.weight") else 0.0)
    mlp: nn.Module = extra.mlp  # type: ignore[assignment]
    mlp.gate_proj.weight[:rank] = adapter.down.weight  # type: ignore[union-attr, index, operator]
    mlp.up_proj.bias[:rank] = 1.0  # type: ignore[union-attr, index, operator]
    mlp.down_proj.weight[:, :rank] = adapter.up.weight  # type: ignore[union-attr, index, operator]
    return folded


def _add_bias(projection: nn.Module) -> None:
    weight: Tensor = projection.weight  # type: ignore[assignment]
    if projection.bias is None:
        projection.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))


def _refuse_other_layers(layer: nn.Module, rank: int, config: PreTrainedConfig) -> None:
    mlp = getattr(layer, "mlp", None)
    projections = [getattr(mlp, name, None) for name in _PROJECTIONS]
    reason = None
    if not hasattr(config, "mlp_bias") or any(type(projection) is not nn.Linear for projection in projections):
        reason = "layers of a gated MLP that may have biases"
    elif getattr(config, "hidden_act", None) not in ("silu", "swish"):
        reason = f"a silu in its MLP, not {config.hidden_act}"
    elif rank > config.intermediate_size:
        reason = f"an MLP as wide as the adapter's rank of {rank}, not {config.intermediate_size}"
    if reason is not None:
        raise UnsupportedModelError(
            "this exit drafts through an adapter, which is no plain weight; to be held as a layer of its own it needs "
            f"{reason}: carry custom_generate instead, which keeps it, or draft from an exit without an adapter"
        )
