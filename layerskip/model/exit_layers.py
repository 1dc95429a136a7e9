"""What an exit may draft through besides the model's own layers: a low-rank adapter, or decoder layers of its own.

What they are for, and where a model keeps them, see `adapters.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from layerskip.model.anatomy import UnsupportedModelError, decoder_layers


class ExitAdapter(nn.Module):
    """A residual bottleneck on (..., hidden_size) hidden states; the identity when new."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor, given: Sequence[Given] = ()) -> Tensor:
        # Normalised first: residual streams grow with depth and differ between families. `down` scales enough. In a
        # model of half precision these weights stay in float32, as an optimizer wants what it trains.
        normed = F.rms_norm(hidden, hidden.shape[-1:]).to(self.down.weight.dtype)
        return hidden + self.up(F.silu(self.down(normed))).to(hidden.dtype)


class Given(NamedTuple):
    """What a forward gave a decoder layer: hidden states, and whatever else layers of its kind take."""

    hidden: Tensor  # (batch, length, hidden_size)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ExitBlocks(nn.Module):
    """Decoder layers of the model's own kind that drafts run in the places of layers [E:E+n); copies of them when new.

    They are given what those layers are given (masks, rotary), but for the cache, whose keys are those layers' own:
    here they read whole texts at once. Drafts call the layers one by one, with keys and values of theirs.

    Raises:
        UnsupportedModelError: if a layer's weights are quantised or elsewhere, so that no copy of it can learn.
        ValueError: if there are fewer than n layers from E on.
    """

    def __init__(self, model: PreTrainedModel, exit_layer: int, number: int) -> None:
        super().__init__()
        layers = decoder_layers(model)
        if exit_layer + number > len(layers):
            raise ValueError(
                f"{number} blocks at exit {exit_layer} are copies of the layers that follow, of which this model has "
                f"{len(layers) - exit_layer}: take fewer blocks or an earlier exit"
            )
        self.layers = nn.ModuleList(_copy(model, layers[exit_layer + i]) for i in range(number))

    def forward(self, hidden: Tensor, given: Sequence[Given]) -> Tensor:
        """(batch, n, hidden_size) after layer E-1, and what layers [E:E+n) were given -> the same shape."""
        for layer, (_, args, kwargs) in zip(self.layers, given, strict=True):
            own = {name: _without_cache(value) for name, value in kwargs.items()}
            output = layer(hidden, *map(_without_cache, args), **own)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden


def _without_cache(argument: Any) -> Any:
    return None if isinstance(argument, Cache) else argument


def _copy(model: PreTrainedModel, layer: nn.Module) -> nn.Module:
    if any(not weight.is_floating_point() or weight.is_meta for weight in layer.parameters()):
        raise UnsupportedModelError(
            f"the layers of this {type(model).__name__} are quantised or offloaded, and an exit's blocks are copies of "
            "them: load the model in a floating-point dtype on one device"
        )
    # The configs stay shared, where attention is chosen; what hangs on the layer is not the copy's.
    kept: dict[int, Any] = {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}
    kept |= {id(hooks): type(hooks)() for hooks in _hooks_of(layer)}
    return copy.deepcopy(layer, kept)


def _hooks_of(module: nn.Module) -> list[dict[Any, Any]]:
    """Every dictionary of forward and backward hooks in a module."""
    inside = [vars(part) for part in module.modules()]
    return [d[name] for d in inside for name in d if "_hooks" in name and name.startswith(("_forward", "_backward"))]
