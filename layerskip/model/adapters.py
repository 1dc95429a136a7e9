"""Exit adapters: what the draft learns beside the model, or instead of it (`Recipe.freeze_model`).

    low-rank    exit E drafts from  head(norm(x_E + up(silu(down(rms(x_E))))))    the identity at first (`up` is zero)
    a block     exit E drafts from  head(norm(block(x_E)))                        at first a copy of layer E, which
                                                                                  it then takes the place of

Verification still runs layers [E:L) on x_E itself, so an adapter can only make drafts better or worse, never the
output. It spares the layers below it the work of speaking the head's language, which they would otherwise learn at
the cost of the layers above. A block costs a draft one more layer, and sees the tokens before: it can copy from them.

They live beside the model's weights in a file of their own, so that the checkpoint stays an ordinary one: `config.json`
says which exits have one ("layerskip": {"adapters": {"rank", "exits"}}, or {"adapters": {"block": true, "exits"}}).
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.checkpoint.companion import find_companion
from layerskip.checkpoint.settings import carried, carry
from layerskip.model.anatomy import UnsupportedModelError, decoder_layers, device_of

ADAPTERS_FILE = "exit_adapters.safetensors"
_ATTRIBUTE = "layerskip_adapters"


class ExitAdapter(nn.Module):
    """A residual bottleneck on (..., hidden_size) hidden states; the identity when new."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Whatever else layer E would be given does not matter here."""
        # Normalised first: residual streams grow with depth and differ between families. `down` scales enough.
        return hidden + self.up(F.silu(self.down(F.rms_norm(hidden, hidden.shape[-1:])))).to(hidden.dtype)


class ExitBlock(nn.Module):
    """A decoder layer of the model's own kind that drafts run in the place of layer E; a copy of it when new.

    It is given what layer E would be given (masks, rotary, a cache), and keeps keys and values of its own.

    Raises:
        UnsupportedModelError: if the layer's weights are quantised or elsewhere, so that no copy of it can learn.
    """

    def __init__(self, model: PreTrainedModel, exit_layer: int) -> None:
        super().__init__()
        layer = decoder_layers(model)[exit_layer]
        if any(not weight.is_floating_point() or weight.is_meta for weight in layer.parameters()):
            raise UnsupportedModelError(
                f"layer {exit_layer} of this {type(model).__name__} is quantised or offloaded, and an exit's block is "
                "a copy of it: load the model in a floating-point dtype on one device"
            )
        text_config = model.config.get_text_config(decoder=True)
        kept: dict[int, Any] = {
            id(config): config for config in (model.config, text_config)
        }  # attention is chosen there
        kept |= {id(hooks): type(hooks)() for hooks in _hooks_of(layer)}  # what hangs on the layer is not the copy's
        self.layer = copy.deepcopy(layer, kept)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(batch, n, hidden_size) after layer E-1, and layer E's other arguments -> the same shape."""
        output = self.layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


def _hooks_of(module: nn.Module) -> list[dict[Any, Any]]:
    """Every dictionary of forward and backward hooks in a module."""
    inside = [vars(part) for part in module.modules()]
    return [d[name] for d in inside for name in d if "_hooks" in name and name.startswith(("_forward", "_backward"))]


Kind = int | Literal["block"]  # of an adapter: low-rank of this rank, or a block
Adapters = nn.ModuleDict  # exit layer (as text) -> ExitAdapter or ExitBlock


def attach_adapters(model: PreTrainedModel, exits: Sequence[int], kind: Kind, seed: int = 0) -> Adapters:
    """Give `model` a trainable adapter at each exit, as a submodule, so that optimizers and engines find its
    parameters; `save_pretrained` leaves them out (see `save_adapters`). Those it has already are kept,
    if they are of this kind and at these exits; otherwise all are new.

    Raises:
        UnsupportedModelError: see `ExitBlock`.
    """
    drop_other_adapters(model, exits, kind)
    if (adapters := adapters_of(model)) is None:
        adapters = _new(model, exits, kind, seed)
    adapters.requires_grad_(True)
    model.add_module(_ATTRIBUTE, adapters)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    model._keys_to_ignore_on_save = {*ignored, *(f"{_ATTRIBUTE}.{name}" for name in adapters.state_dict())}
    carry(model.config, adapters=_description(exits, kind))
    return adapters


def _description(exits: Sequence[int], kind: Kind) -> dict[str, Any]:
    """What `config.json` says of adapters."""
    return {**({"block": True} if kind == "block" else {"rank": kind}), "exits": sorted(exits)}


def drop_other_adapters(model: PreTrainedModel, exits: Sequence[int] = (), kind: Kind | None = None) -> None:
    """Take off the adapters that `model` came with, unless they are of this kind at `exits`.

    They were made for the model as it was: one that is trained further without them must not name them in its config.
    """
    kept = None if kind is None else _description(exits, kind)
    if carried(model.config).get("adapters") in (None, kept):
        return
    model._modules.pop(_ATTRIBUTE, None)
    _loaded.pop(model, None)
    carry(model.config, adapters=None)


def _new(model: PreTrainedModel, exits: Sequence[int], kind: Kind, seed: int) -> Adapters:
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    made = nn.ModuleDict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for exit_layer in sorted(exits):
            made[str(exit_layer)] = (
                ExitBlock(model, exit_layer) if kind == "block" else ExitAdapter(hidden_size, int(kind))
            )
    return made.to(device_of(model))


_loaded: weakref.WeakKeyDictionary[nn.Module, Adapters | None] = weakref.WeakKeyDictionary()


def adapters_of(model: PreTrainedModel) -> Adapters | None:
    """The model's adapters: those it trains, else those its checkpoint has (folder or Hub repository), else None.

    Raises:
        FileNotFoundError: if the checkpoint's config names adapters but their file is not beside its weights.
        ValueError: if that file holds others.
    """
    attached = model._modules.get(_ATTRIBUTE)
    if isinstance(attached, nn.ModuleDict):
        return attached
    if model not in _loaded:
        _loaded[model] = _load(model)
    adapters = _loaded[model]
    return None if adapters is None else adapters.to(device_of(model), model.dtype)


def adapter_at(model: PreTrainedModel, exit_layer: int) -> nn.Module | None:
    """The adapter of one exit, None where there is none."""
    adapters = adapters_of(model)
    return adapters[str(exit_layer)] if adapters is not None and str(exit_layer) in adapters else None


def has_block(model: PreTrainedModel, exit_layer: int) -> bool:
    """Whether drafts of this exit run a block of their own, which needs keys and values of its own."""
    return isinstance(adapter_at(model, exit_layer), ExitBlock)


def find_adapters(config: PreTrainedConfig) -> Path | None:
    """The file of the adapters that a checkpoint's config names, None where it names none.

    Raises:
        FileNotFoundError: if it is not beside the checkpoint's weights.
    """
    way_out = "copy it there, or load the checkpoint from where it was trained"
    return find_companion(config, "adapters", ADAPTERS_FILE, way_out)


def _load(model: PreTrainedModel) -> Adapters | None:
    path = find_adapters(model.config)
    if path is None:
        return None
    described = carried(model.config)["adapters"]
    kind: Kind = "block" if described.get("block") else described["rank"]
    adapters = _new(model, described["exits"], kind, 0)
    try:
        adapters.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError):  # other names or shapes, or no such file at all
        raise ValueError(
            f"{path} does not hold the adapters that the checkpoint's config names ({_name(kind)} at exits "
            f"{', '.join(map(str, described['exits']))}): copy the file that was saved with these weights"
        ) from None
    return adapters.eval().requires_grad_(False)


def _name(kind: Kind) -> str:
    return "blocks" if kind == "block" else f"rank {kind}"


def save_adapters(
    model: PreTrainedModel, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None
) -> Path | None:
    """Write the model's adapters into the folder that `save_pretrained` wrote; returns the file, None without any.

    Args:
        state_dict: the model's, where it was gathered from shards or cast; None: as they are.
    """
    prefix = f"{_ATTRIBUTE}."
    if state_dict is not None:
        weights = {name.removeprefix(prefix): w for name, w in state_dict.items() if name.startswith(prefix)}
    else:
        adapters = adapters_of(model)
        weights = adapters.state_dict() if adapters is not None else {}
    if not weights:
        return None
    path = Path(folder) / ADAPTERS_FILE
    save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, path)
    return path
