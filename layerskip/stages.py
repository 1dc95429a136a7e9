"""Stages: layers [0:E) and [E:L) of a causal LM, run by the model's own forward.

A model's `forward` knows its embeddings, positions, masks, rotary, soft-caps, scales and head. So a stage is
not a second forward but a *view*: a shallow copy of the model whose layer list has stand-ins where layers are
left out. The copy shares every parameter and buffer with the original, which is never touched.

    draft    embed -> [layers 0 .. E-1, Tap]                     -> norm, head    Tap keeps h_E
    verify   embed -> [Inject h_E, Skip x (E-1), layers E .. L-1] -> norm, head    Inject replaces the embeddings

Stand-ins keep indices aligned, since models look up `config.layer_types[i]` by position. This file is the
only one that knows how transformers' models are built; nothing here knows a model family.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from layerskip.cache import RollbackCache

# Relative error allowed between the stages and the model at construction. Both run the same kernels on the
# same shapes, so the difference is zero on every architecture tried; the slack is for nondeterministic kernels.
SELF_CHECK_TOLERANCE = 1e-3


class UnsupportedModelError(ValueError):
    """The model cannot be cut into stages; the message says why."""


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
    """Passes the hidden states on and keeps them."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        self.hidden = hidden_states
        return self.give(hidden_states)


class Inject(StandIn):
    """Passes its own hidden states on instead of those it is given."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        assert self.hidden is not None
        return self.give(self.hidden)


class Spy(StandIn):
    """Runs the layer it stands for and keeps its hidden states, and whether they came in a tuple."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["stands_for"](*args, **kwargs)
        self.returns_tuple = isinstance(output, tuple)
        self.hidden = output[0] if self.returns_tuple else output
        return output


@dataclass(frozen=True)
class Anatomy:
    """Where a model keeps what the stages need.

    Attributes:
        layers_path: attribute path from the model to its list of decoder layers, e.g. ("model", "layers").
        num_layers: L.
        cache_argument: name of `forward`'s cache argument (`cache` since transformers 5.24).
        keeps_logits: whether `forward` takes `logits_to_keep`.
    """

    layers_path: tuple[str, ...]
    num_layers: int
    cache_argument: str
    keeps_logits: bool


class Stages:
    """Layers [0:E) and [E:L) of `model`, with the model's own embeddings, norm and head.

    Views are cheap; every `Stages` has its own, so several may decode from one model in several threads.
    The first construction for an exit layer checks the stages against the model; later ones trust it.

    Args:
        model: a decoder-only `transformers` causal LM in eval mode (PEFT- or compile-wrapped is unwrapped).
        exit_layer: E, the number of layers that draft, 1 .. L-1; None leaves the model whole, for plain
            decoding through the same interface.

    Raises:
        UnsupportedModelError: if the model cannot be cut (encoder-decoder, recurrent state, shared KV, ...)
            or the stages do not reproduce it.
        ValueError: if `exit_layer` is out of range or the model is in training mode.
    """

    def __init__(self, model: nn.Module, exit_layer: int | None) -> None:
        self.model = unwrap(model)
        if self.model.training:
            raise ValueError("the model is in training mode, where dropout is on: call model.eval() first")
        self.anatomy = anatomy(self.model)
        self.num_layers = self.anatomy.num_layers
        self.exit_layer = None if exit_layer is None else check_exit_layer(exit_layer, self.num_layers)
        self._no_position = torch.empty(0, dtype=torch.long, device=self.model.device)
        if self.exit_layer is not None:
            self._cut(self.exit_layer)

    def _cut(self, exit_layer: int) -> None:
        layers = decoder_layers(self.model)
        returns_tuple = _layers_return_tuples(self.model)
        self._tap = Tap(layers[exit_layer], returns_tuple)
        self._inject = Inject(layers[0], returns_tuple)
        skips = [Skip(layer, returns_tuple) for layer in layers[1:exit_layer]]
        self._early = self._view([*layers[:exit_layer], self._tap])
        self._late = self._view([self._inject, *skips, *layers[exit_layer:]])
        if exit_layer not in _checked_exits(self.model):
            self._self_check()
            _checked_exits(self.model).add(exit_layer)

    def new_cache(self, capacity: int = 256, limit: int | None = None) -> RollbackCache:
        return RollbackCache(self.num_layers, capacity, limit)

    def prefill(self, token_ids: Tensor, cache: RollbackCache) -> None:
        """Run the whole model over (batch, n) tokens for their keys and values alone."""
        self._run(self.model, token_ids, cache, logits_to_keep=0)

    def draft(
        self, token_ids: Tensor, cache: RollbackCache, with_logits: bool = True
    ) -> tuple[Tensor | None, Tensor]:
        """Run layers [0:E) over (batch, n) tokens.

        Returns:
            The exit's logits at the last position (batch, 1, vocab), or None if not asked for, and the hidden
            states after layer E-1 of all n positions (batch, n, hidden_size).
        """
        assert self.exit_layer is not None, "a whole model does not draft"
        view = cache.stage(0, self.exit_layer)
        logits = self._run(self._early, token_ids, view, logits_to_keep=int(with_logits))
        hidden, self._tap.hidden = self._tap.hidden, None
        assert hidden is not None
        return (logits[:, -1:] if with_logits else None), hidden

    def verify(self, token_ids: Tensor, hidden: Tensor | None, cache: RollbackCache) -> Tensor:
        """Run layers [E:L) over the hidden states (batch, n, hidden_size) that `draft` gave for (batch, n)
        tokens, or the whole model where there are none; return the model's logits (batch, n, vocab)."""
        if self.exit_layer is None or hidden is None:
            return self._run(self.model, token_ids, cache, logits_to_keep=token_ids.shape[1])
        self._inject.hidden = hidden
        view = cache.stage(self.exit_layer, self.num_layers)
        try:
            return self._run(self._late, token_ids, view, logits_to_keep=token_ids.shape[1])
        finally:
            self._inject.hidden = None

    def _run(self, model: nn.Module, token_ids: Tensor, cache: Cache, logits_to_keep: int) -> Tensor:
        arguments: dict[str, Any] = {self.anatomy.cache_argument: cache}
        if self.anatomy.keeps_logits:
            # 0 means "all" to transformers; an empty list of positions means none, and costs no head.
            arguments["logits_to_keep"] = logits_to_keep or self._no_position
        return model(input_ids=token_ids, use_cache=True, return_dict=True, **arguments).logits

    def _view(self, layers: list[nn.Module]) -> nn.Module:
        return _with_layers(self.model, self.anatomy.layers_path, layers)

    @torch.no_grad()
    def _self_check(self) -> None:
        """[0:E) then [E:L) over two chunks must give the model's own logits."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        token_ids = torch.arange(3, 10, device=self.model.device).remainder(vocab_size)[None]  # (1, 7)
        whole, staged = self.new_cache(8), self.new_cache(8)
        for chunk in token_ids.split([4, 3], dim=1):
            expected = self._run(self.model, chunk, whole, logits_to_keep=chunk.shape[1])
            _, hidden = self.draft(chunk, staged)
            actual = self.verify(chunk, hidden, staged)
            error = (actual.float() - expected.float()).norm() / expected.float().norm()
            if not error <= SELF_CHECK_TOLERANCE:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: layers [0:{self.exit_layer}) then [{self.exit_layer}:"
                    f"{self.num_layers}) differ from the whole model (relative error {error:.1e}, limit "
                    f"{SELF_CHECK_TOLERANCE:.0e}); decode it with plain model.generate()"
                )


class Head:
    """The model's own final norm, head, scales and soft-cap, for hidden states of any layer.

    A view whose only layer is an Inject; gradients flow through it into the shared parameters.

    Attributes:
        returns_tuple: whether the model expects its layers to answer with a tuple; whoever watched one knows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.returns_tuple = False
        self._inject = Inject(decoder_layers(model)[0])
        self._view = _with_layers(model, anatomy(model).layers_path, [self._inject])

    def __call__(self, hidden: Tensor) -> Tensor:
        """(batch, n, hidden_size) after some layer -> (batch, n, vocab) logits."""
        self._inject.returns_tuple, self._inject.hidden = self.returns_tuple, hidden
        try:
            token_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return self._view(input_ids=token_ids, use_cache=False, return_dict=True).logits
        finally:
            self._inject.hidden = None


class ExitReader:
    """Logits of several exits from one pass over the model, which is left untouched.

    Args:
        model: a causal LM in eval mode.
        exits: exit layers, 1 .. L-1.
    """

    def __init__(self, model: nn.Module, exits: Sequence[int]) -> None:
        inner = unwrap(model)
        layers = decoder_layers(inner)
        self._spies = {e: Spy(layers[check_exit_layer(e, len(layers)) - 1]) for e in sorted(set(exits))}
        watched = [self._spies.get(index + 1, layer) for index, layer in enumerate(layers)]
        self._view = _with_layers(inner, anatomy(inner).layers_path, watched)
        self._head = Head(inner)

    @torch.no_grad()
    def read(self, token_ids: Tensor) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
        """Run (batch, length) tokens.

        Returns:
            The model's logits (batch, length, vocab), and an iterator of (exit layer, its logits), computed one
            at a time so that only two sets of logits exist at once.
        """
        logits = self._view(input_ids=token_ids, use_cache=False, return_dict=True).logits
        return logits, self._exits()

    @torch.no_grad()
    def _exits(self) -> Iterator[tuple[int, Tensor]]:
        for exit_layer, spy in self._spies.items():
            assert spy.hidden is not None
            self._head.returns_tuple = spy.returns_tuple
            yield exit_layer, self._head(spy.hidden)
            spy.hidden = None


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order."""
    return list(_reach(model, anatomy(model).layers_path))  # type: ignore[call-overload]


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT, torch.compile or (D)DP wrapper.

    Raises:
        UnsupportedModelError: if there is no causal LM inside.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()  # type: ignore[operator]
        elif not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # type: ignore[assignment]
        else:
            break
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers causal LM: load one with AutoModelForCausalLM"
        )
    return model


def check_exit_layer(exit_layer: int, num_layers: int) -> int:
    """Return `exit_layer` if it is one of 1 .. L-1, else raise ValueError."""
    if isinstance(exit_layer, bool) or not isinstance(exit_layer, int):
        raise ValueError(f"exit_layer must be a whole number of layers, got {exit_layer!r}")
    if not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer={exit_layer} is out of range: this model has {num_layers} layers, so choose "
            f"1 to {num_layers - 1} (the number of layers that draft)"
        )
    return exit_layer


_anatomies: weakref.WeakKeyDictionary[nn.Module, Anatomy] = weakref.WeakKeyDictionary()
_tuples: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_checked: weakref.WeakKeyDictionary[nn.Module, dict[Any, set[int]]] = weakref.WeakKeyDictionary()


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the parts of `model` that stages are made of, or refuse it.

    Raises:
        UnsupportedModelError: with the reason.
    """
    if model not in _anatomies:
        _refuse_unsupported(model)
        path, count = _find_layers(model)
        parameters = inspect.signature(type(model).forward).parameters
        _anatomies[model] = Anatomy(
            layers_path=path,
            num_layers=count,
            cache_argument="cache" if "cache" in parameters else "past_key_values",
            keeps_logits="logits_to_keep" in parameters,
        )
    return _anatomies[model]


def num_layers(model: PreTrainedModel) -> int:
    """L, the number of decoder layers; the exit layers of the model are 1 .. L-1."""
    return model.config.get_text_config(decoder=True).num_hidden_layers


def _checked_exits(model: PreTrainedModel) -> set[int]:
    """Exit layers whose stages were checked for this model as it is now (dtype, device, attention)."""
    state = (model.dtype, model.device, model.config._attn_implementation)
    return _checked.setdefault(model, {}).setdefault(state, set())


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder: only decoder-only models can draft early")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps a recurrent state, which cannot be rolled back")
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name} shares keys and values between layers, so stages would miss them")
    for layer in DynamicCache(config=text_config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"{name} has a layer whose state is a {type(layer).__name__}: only attention's keys and "
                "values can be rolled back"
            )


def _find_layers(model: PreTrainedModel) -> tuple[tuple[str, ...], int]:
    """Path and length of the decoder's layer list: the list as long as the text config says."""
    count = num_layers(model)
    if count < 2:
        raise UnsupportedModelError(f"{type(model).__name__} has {count} layer: none can draft for the rest")
    names = {id(module): name for name, module in model.named_modules()}
    for root in (model.get_decoder(), model):  # the decoder first: another tower may have as many layers
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in names:
                return tuple(names[id(module)].split(".")), count
    raise UnsupportedModelError(f"{type(model).__name__}: found no list of its {count} decoder layers")


@torch.no_grad()
def _layers_return_tuples(model: PreTrainedModel) -> bool:
    """Ask the first layer, on one token, once a model."""
    if model not in _tuples:
        path = anatomy(model).layers_path
        spy = Spy(_reach(model, path)[0])  # type: ignore[index]
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        _with_layers(model, path, [spy])(input_ids=token, use_cache=False)
        _tuples[model] = spy.returns_tuple
    return _tuples[model]


def _with_layers(model: nn.Module, path: tuple[str, ...], layers: list[nn.Module]) -> nn.Module:
    """A copy of `model` along `path` only, its layer list replaced; everything else is shared."""
    copy = _shallow_copy(model)
    name, rest = path[0], path[1:]
    child = _with_layers(model._modules[name], rest, layers) if rest else nn.ModuleList(layers)  # type: ignore[arg-type]
    copy._modules[name] = child
    return copy


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    # A forward put here by others (accelerate's dispatch, a compiled one) would run the original's layers, and
    # hooks on the whole model are about the whole model. Layers are not copied: they keep theirs.
    copy.__dict__.pop("forward", None)
    for name in list(copy.__dict__):
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and name.startswith("_"):
            copy.__dict__[name] = type(copy.__dict__[name])()
    return copy


def _reach(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module
