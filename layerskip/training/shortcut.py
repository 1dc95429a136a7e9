"""Layers whose output a training step has no use for are not run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class Shortcut:
    """While open, layers in training mode pass their hidden states on; as modules they are still called, so that hooks
    see what they are given and sharded engines count on. In evaluation mode they run, whatever kept `close` from being
    called (an interrupt, which passes by hooks that are always called).

    Args:
        layers: all decoder layers of the model.
        returns_tuple: whether the model expects a layer to answer with a tuple.
    """

    def __init__(self, layers: Sequence[nn.Module], returns_tuple: bool) -> None:
        self._layers, self._returns_tuple = layers, returns_tuple
        self._own: list[tuple[nn.Module, Any]] = []  # layers that pass on, and the forward of their own that they had

    def open(self, first: int) -> None:
        """Leave out layers [first:L)."""
        self.close()
        for layer in self._layers[first:]:
            self._own.append((layer, layer.__dict__.get("forward")))  # one of their own: dispatched, compiled
            layer.__dict__["forward"] = partial(self._pass_on, layer, layer.forward)

    def close(self) -> None:
        """Run all layers again."""
        for layer, forward in self._own:
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward
        self._own.clear()

    def _pass_on(self, layer: nn.Module, own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return own(hidden_states, *args, **kwargs)
        return (hidden_states,) if self._returns_tuple else hidden_states
