"""Views: shallow copies of a model whose layer list has stand-ins where layers are left out or watched.

A copy shares every parameter and buffer with the original, which is never touched. Stand-ins keep indices
aligned, since models look up `config.layer_types[i]` by position, and answer for the layer they stand for.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from layerskip.model.anatomy import anatomy, decoder_layers, device_of
from layerskip.model.block import Block, Sight
from layerskip.model.exit_layers import Given


class StandIn(nn.Module):
    """Takes a decoder layer's place in the layer list and answers for its attributes."""

    def __init__(self, layer: nn.Module, returns_tuple: bool = False) -> None:
        super().__init__()
        self.__dict__["stands_for"] = layer  # not a submodule: its parameters belong to the model
        self.returns_tuple = returns_tuple
        self.hidden: Tensor | None = None  # (batch, n, hidden_size)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"], name)

    def give(self, hidden: Tensor) -> Tensor | tuple[Tensor, None]:
        return (hidden, None) if self.returns_tuple else hidden


class Skip(StandIn):
    """Passes the hidden states on."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        return self.give(hidden_states)


class Tap(StandIn):
    """Keeps the hidden states and passes them on, through the exit's adapter or the block in the layer's place."""

    adapter: nn.Module | None = None
    block: nn.Module | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.hidden = hidden_states
        if self.block is not None:
            return self.block(hidden_states, *args, **kwargs)
        return self.give(hidden_states if self.adapter is None else self.adapter(hidden_states))


class Inject(StandIn):
    """Passes its own hidden states on instead of those it is given."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        assert self.hidden is not None
        return self.give(self.hidden)


@dataclass
class Here:
    """What all layers of a view share: the block of the pass that runs, None where the model's own masks are right."""

    block: Block | None = None


class Placed(StandIn):
    """Runs the layer it stands for; where there is a block, with the block's attention mask instead of the model's."""

    def __init__(self, layer: nn.Module, sight: Sight, here: Here) -> None:
        super().__init__(layer)
        self.sight, self.here = sight, here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.__dict__["stands_for"]
        if self.here.block is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            mask = self.here.block.mask(self.sight, hidden.dtype).to(hidden.device)
            inside = getattr(layer, "_orig_mod", layer)  # of a compiled one
            place = _mask_place(type(inside))  # type: ignore[arg-type]
            if place < len(args):
                args = (*args[:place], mask, *args[place + 1 :])
            else:
                kwargs["attention_mask"] = mask
        return layer(*args, **kwargs)


@lru_cache(maxsize=64)
def _mask_place(layer: type[nn.Module]) -> int:
    """At which position the layer's forward takes its attention mask, `self` not counted."""
    return list(inspect.signature(layer.forward).parameters).index("attention_mask") - 1


class Spy(StandIn):
    """Runs the layer it stands for and keeps its hidden states, and whether they came in a tuple."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["stands_for"](*args, **kwargs)
        self.returns_tuple = isinstance(output, tuple)
        self.hidden = output[0] if self.returns_tuple else output
        return output


class LayerList(nn.ModuleList):
    """The layer list of a view. Models write `self.layers[: config.num_hidden_layers]`: where that is all of
    them, it is this list and not a new one with every layer registered anew, which takes as long as the mask."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


def with_layers(model: nn.Module, path: tuple[str, ...], layers: list[nn.Module]) -> nn.Module:
    """A copy of `model` along `path` only, its layer list replaced; everything else is shared."""
    copy = _shallow_copy(model)
    name, rest = path[0], path[1:]
    child = with_layers(model._modules[name], rest, layers) if rest else LayerList(layers)  # type: ignore[arg-type]
    copy._modules[name] = child
    return copy


def silent(model: nn.Module) -> dict[str, bool]:
    """Arguments for a forward of a view of `model`: where the config asks experts what their routers say, it does not,
    since the layers that would tell may be replaced."""
    return {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy = object.__new__(module.__class__)  # __new__ of a class that FSDP2 made builds something else
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    # A forward put here by others (accelerate's dispatch, a compiled one) would run the original's layers, what saves
    # or copies it would do so with the original, and hooks on the whole model are about the whole model. Layers are not
    # copied: they keep theirs.
    for name in ("forward", "_compiled_call_impl", "save_pretrained", "__deepcopy__"):  # the second: of model.compile()
        copy.__dict__.pop(name, None)
    for name in list(copy.__dict__):
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and name.startswith("_"):
            copy.__dict__[name] = type(copy.__dict__[name])()
    return copy


_tuples: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@torch.no_grad()
def layers_return_tuples(model: PreTrainedModel) -> bool:
    """Ask the first layer, on one token, once a model."""
    if model not in _tuples:
        spy = Spy(decoder_layers(model)[0])
        token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
        with torch.random.fork_rng():  # a model in training draws
            with_layers(model, anatomy(model).layers_path, [spy])(input_ids=token, use_cache=False, **silent(model))
        _tuples[model] = spy.returns_tuple
    return _tuples[model]


class Head:
    """The model's own final norm, head, scales and soft-cap, for hidden states of any layer.

    A view whose only layer is an Inject; gradients flow through it into the shared parameters.

    Attributes:
        returns_tuple: whether the model expects its layers to answer with a tuple; whoever watched one knows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.returns_tuple = False
        self._inject = Inject(decoder_layers(model)[0])
        self._view = with_layers(model, anatomy(model).layers_path, [self._inject])

    def watch(self, layer: nn.Module, args: Any, output: Any) -> None:
        """A layer's forward hook: how layers answer."""
        self.returns_tuple = isinstance(output, tuple)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(batch, n, hidden_size) after some layer -> (batch, n, vocab) logits."""
        self._inject.returns_tuple, self._inject.hidden = self.returns_tuple, hidden
        try:
            token_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return self._view(input_ids=token_ids, use_cache=False, return_dict=True, **silent(self._view)).logits
        finally:
            self._inject.hidden = None


def listen(layer: nn.Module, keep: Callable[[Given], None]) -> RemovableHandle:
    """Tell `keep` what the layer is given at each of its forwards, before others' hooks change it."""
    return layer.register_forward_pre_hook(partial(_tell, keep), with_kwargs=True, prepend=True)


def _tell(keep: Callable[[Given], None], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args:
        keep(Given(args[0], args[1:], dict(kwargs)))
    else:
        keep(Given(kwargs["hidden_states"], (), {n: v for n, v in kwargs.items() if n != "hidden_states"}))
