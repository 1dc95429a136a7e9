"""Exit adapters: what the draft learns beside the model, or instead of it (`Recipe.freeze_model`).

    low-rank    exit E drafts from  head(norm(x_E + up(silu(down(rms(x_E))))))    the identity at first (`up` is zero)
    blocks      exit E drafts from  head(norm(blocks(x_E)))                       at first copies of the layers that
                                                                                  follow, whose places they take

Verification still runs layers [E:L) on x_E itself, so an adapter can only make drafts better or worse, never the
output. It spares the layers below it the work of speaking the head's language, which they would otherwise learn at
the cost of the layers above. A block costs a draft one more layer, and sees the tokens before: it can copy from them.

They live beside the model's weights in a file of their own, so that the checkpoint stays an ordinary one: `config.json`
says which exits have one ("layerskip": {"adapters": {"rank", "exits"}}, or {"adapters": {"blocks", "exits"}}).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.checkpoint.companion import find_companion
from layerskip.checkpoint.settings import carried, carry
from layerskip.model.anatomy import decoder_layers, device_of
from layerskip.model.exit_layers import ExitAdapter, ExitBlocks

ADAPTERS_FILE = "exit_adapters.safetensors"
_ATTRIBUTE = "layerskip_adapters"


class Kind(NamedTuple):
    """Of adapters: low-rank ones of this rank, or so many blocks."""

    rank: int | None = None
    blocks: int | None = None

    def make(self, model: PreTrainedModel, exit_layer: int) -> nn.Module:
        """A new one."""
        if self.blocks is not None:
            return ExitBlocks(model, exit_layer, self.blocks)
        assert self.rank is not None
        return ExitAdapter(model.config.get_text_config(decoder=True).hidden_size, self.rank)

    def describe(self, exits: Sequence[int]) -> dict[str, Any]:
        """What `config.json` says of them."""
        return {**({"rank": self.rank} if self.blocks is None else {"blocks": self.blocks}), "exits": sorted(exits)}

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.blocks is None else f"blocks {self.blocks}"


Adapters = nn.ModuleDict  # exit layer (as text) -> ExitAdapter or ExitBlocks


def attach_adapters(
    model: PreTrainedModel, exits: Sequence[int], rank: int | None = None, blocks: int | None = None, seed: int = 0
) -> Adapters:
    """Give `model` a trainable adapter at each exit, as a submodule, so that optimizers and engines find its
    parameters; `save_pretrained` writes them into a file of their own. Those it has already are kept, if they are of
    this kind and at these exits; otherwise all are new.

    Args:
        exits: exit layers, 1 .. L-1.
        rank: of low-rank adapters; or
        blocks: how many decoder layers of its own each exit has.

    Raises:
        UnsupportedModelError, ValueError: see `ExitBlocks`.
    """
    kind = Kind(rank, blocks)
    drop_other_adapters(model, exits, rank, blocks)
    if (adapters := adapters_of(model)) is None:
        adapters = _new(model, exits, kind, seed)
    adapters.requires_grad_(True)
    model.add_module(_ATTRIBUTE, adapters)
    model.save_pretrained = partial(_save_pretrained, model)  # whoever's loop it is: a Trainer's, TRL's, push_to_hub
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    model._keys_to_ignore_on_save = {*ignored, *(f"{_ATTRIBUTE}.{name}" for name in adapters.state_dict())}
    carry(model.config, adapters=kind.describe(exits))
    return adapters


def drop_other_adapters(
    model: PreTrainedModel, exits: Sequence[int] = (), rank: int | None = None, blocks: int | None = None
) -> None:
    """Take off the adapters that `model` came with, unless they are of this kind at `exits`.

    They were made for the model as it was: one that is trained further without them must not name them in its config.
    """
    if carried(model.config).get("adapters") in (None, Kind(rank, blocks).describe(exits)):
        return
    if model._modules.pop(_ATTRIBUTE, None) is not None:
        del model.save_pretrained
    _loaded.pop(model, None)
    carry(model.config, adapters=None)


def _new(model: PreTrainedModel, exits: Sequence[int], kind: Kind, seed: int) -> Adapters:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.ModuleDict({str(exit_layer): kind.make(model, exit_layer) for exit_layer in sorted(exits)})
    return made.to(device_of(model))


_loaded: weakref.WeakKeyDictionary[nn.Module, Adapters | None] = weakref.WeakKeyDictionary()


def adapters_of(model: PreTrainedModel) -> Adapters | None:
    """The model's adapters: those it trains, else those its checkpoint has (folder or Hub repository), else None.

    Raises:
        FileNotFoundError: if the checkpoint's config names adapters but their file is not beside its weights.
        ValueError: if that file holds others, or the config does not say which.
    """
    attached = model._modules.get(_ATTRIBUTE)
    if isinstance(attached, nn.ModuleDict):
        return attached
    if model not in _loaded:
        _loaded[model] = _load(model)
    if (adapters := _loaded[model]) is None:
        return None
    if next(adapters.parameters()).dtype != model.dtype:  # else left alone: blocks may have parts in float32, as layers
        adapters.to(model.dtype)
    return adapters.to(device_of(model))


def own_weights(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """The model's weights without those of adapters that it trains."""
    return (weight for name, weight in model.named_parameters() if not name.startswith(f"{_ATTRIBUTE}."))


def adapter_at(model: PreTrainedModel, exit_layer: int) -> nn.Module | None:
    """The adapter of one exit, None where there is none."""
    adapters = adapters_of(model)
    return adapters[str(exit_layer)] if adapters is not None and str(exit_layer) in adapters else None


def num_blocks(model: PreTrainedModel, exit_layer: int) -> int:
    """How many layers of their own drafts of this exit run, each with keys and values of its own."""
    adapter = adapter_at(model, exit_layer)
    return len(adapter.layers) if isinstance(adapter, ExitBlocks) else 0


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
    kind, exits = _read(carried(model.config)["adapters"], len(decoder_layers(model)))
    adapters = _new(model, exits, kind, 0)
    try:
        adapters.load_state_dict(load_file(path))
    except (RuntimeError, SafetensorError):  # other names or shapes, or no such file at all
        raise ValueError(
            f"{path} does not hold the adapters that the checkpoint's config names ({kind} at exits "
            f"{', '.join(map(str, exits))}): copy the file that was saved with these weights"
        ) from None
    return adapters.eval().requires_grad_(False)


def _read(described: Any, num_layers: int) -> tuple[Kind, list[int]]:
    """Kind and exits of what `Kind.describe` gave, which somebody may have edited since."""

    def number(value: Any, most: int | None = None) -> bool:
        return type(value) is int and value >= 1 and (most is None or value <= most)

    if isinstance(described, dict):
        kind, exits = Kind(described.get("rank"), described.get("blocks")), described.get("exits")
        one = [value for value in kind if value is not None]
        known = isinstance(exits, list) and all(number(e, num_layers - 1) for e in exits)
        if len(one) == 1 and number(one[0]) and exits and known:
            return kind, exits
    raise ValueError(
        f"the checkpoint's config.json says layerskip.adapters={described!r}, which are none: it takes blocks or rank, "
        f"1 or more, and exits, a list of numbers from 1 to {num_layers - 1}, as they were saved"
    )


def _save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The model's own `save_pretrained`, and its adapters beside the weights.

    Raises:
        ValueError: if it is to upload, which it would have done before the adapters are there.
    """
    if push_to_hub:
        raise ValueError(
            "push_to_hub=True would leave the exits' adapters behind: save_pretrained, then model.push_to_hub(...)"
        )
    gathered = None if state_dict is None else dict(state_dict)  # transformers takes the adapters out of it
    type(model).save_pretrained(model, save_directory, is_main_process, state_dict, False, *args, **kwargs)
    if is_main_process:
        save_adapters(model, save_directory, gathered)


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
