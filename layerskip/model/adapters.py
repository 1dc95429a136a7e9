"""Exit adapters: what the draft learns beside the model, or instead of it (`Recipe.freeze_model`).

    exit E drafts from  head(norm(x_E + up(silu(down(rms(x_E))))))

Verification still runs layers [E:L) on x_E itself, so an adapter can only make drafts better or worse, never the
output. It spares the layers below it the work of speaking the head's language, which they would otherwise learn at
the cost of the layers above. Adapters start as the identity (`up` is zero).

They live beside the model's weights in a file of their own, so that the checkpoint stays an ordinary one:
`config.json` says which exits have one ("layerskip": {"adapters": {"rank", "exits"}}).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.checkpoint.companion import find_companion
from layerskip.checkpoint.settings import carried, carry
from layerskip.model.anatomy import device_of

ADAPTERS_FILE = "exit_adapters.safetensors"
_ATTRIBUTE = "layerskip_adapters"


class ExitAdapter(nn.Module):
    """A residual bottleneck on (..., hidden_size) hidden states; the identity when new."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        # Normalised first: residual streams grow with depth and differ between families. `down` scales enough.
        return hidden + self.up(F.silu(self.down(F.rms_norm(hidden, hidden.shape[-1:])))).to(hidden.dtype)


Adapters = nn.ModuleDict  # exit layer (as text) -> ExitAdapter


def attach_adapters(model: PreTrainedModel, exits: Sequence[int], rank: int, seed: int = 0) -> Adapters:
    """Give `model` a trainable adapter at each exit, as a submodule, so that optimizers and engines find its
    parameters; `save_pretrained` leaves them out (see `save_adapters`). Those it has already are kept,
    if they are of this rank and at these exits; otherwise all are new."""
    drop_other_adapters(model, exits, rank)
    if (adapters := adapters_of(model)) is None:
        adapters = _new(model, exits, rank, seed)
    adapters.requires_grad_(True)
    model.add_module(_ATTRIBUTE, adapters)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    model._keys_to_ignore_on_save = {*ignored, *(f"{_ATTRIBUTE}.{name}" for name in adapters.state_dict())}
    carry(model.config, adapters={"rank": rank, "exits": sorted(exits)})
    return adapters


def drop_other_adapters(model: PreTrainedModel, exits: Sequence[int] = (), rank: int | None = None) -> None:
    """Take off the adapters that `model` came with, unless they are of `rank` at `exits`.

    They were made for the model as it was: one that is trained further without them must not name them in its config.
    """
    if carried(model.config).get("adapters") in (None, {"rank": rank, "exits": sorted(exits)}):
        return
    model._modules.pop(_ATTRIBUTE, None)
    _loaded.pop(model, None)
    carry(model.config, adapters=None)


def _new(model: PreTrainedModel, exits: Sequence[int], rank: int, seed: int) -> Adapters:
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.ModuleDict({str(exit_layer): ExitAdapter(hidden_size, rank) for exit_layer in sorted(exits)})
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
    adapters = _new(model, described["exits"], described["rank"], 0)
    try:
        adapters.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError):  # other names or shapes, or no such file at all
        raise ValueError(
            f"{path} does not hold the adapters that the checkpoint's config names (rank {described['rank']} at exits "
            f"{', '.join(map(str, described['exits']))}): copy the file that was saved with these weights"
        ) from None
    return adapters.eval().requires_grad_(False)


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
