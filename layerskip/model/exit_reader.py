"""What every exit would say: the logits of several, read in one pass over the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from layerskip.model.adapters import adapter_at, num_blocks
from layerskip.model.anatomy import decoder_layers, unwrap
from layerskip.model.exit_layers import Given
from layerskip.model.exit_number import check_exit_layer
from layerskip.model.views import Head, listen


class ExitReader:
    """Logits of several exits from one pass over the model: an ordinary forward, whatever engine shares it out.

    Args:
        model: a causal LM in eval mode.
        exits: exit layers, 1 .. L-1.
    """

    def __init__(self, model: nn.Module, exits: Sequence[int]) -> None:
        self._model = unwrap(model)
        layers = decoder_layers(self._model)
        self._adapters = {e: adapter_at(self._model, check_exit_layer(e, len(layers))) for e in sorted(set(exits))}
        self._places = {e: range(e, e + max(1, num_blocks(self._model, e))) for e in self._adapters}
        self._layers = {i: layers[i] for places in self._places.values() for i in places}
        self._given: dict[int, Given] = {}  # by layer
        self._head = Head(self._model)

    @torch.no_grad()
    def read(
        self, token_ids: Tensor, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
        """Run (batch, length) tokens; with `position_ids` where several documents share a row.

        Returns:
            The model's logits (batch, length, vocab), and an iterator of (exit layer, its logits), computed one
            at a time so that only two sets of logits exist at once.
        """
        places = {} if position_ids is None else {"position_ids": position_ids}
        hooks = [listen(layer, partial(self._given.__setitem__, i)) for i, layer in self._layers.items()]
        hooks += [layer.register_forward_hook(self._head.watch) for layer in self._layers.values()]
        try:
            logits = self._model(input_ids=token_ids, use_cache=False, return_dict=True, **places).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits, self._exits()

    @torch.no_grad()
    def _exits(self) -> Iterator[tuple[int, Tensor]]:
        with gathered(self._model):
            for exit_layer, adapter in self._adapters.items():
                given = [self._given[i] for i in self._places[exit_layer]]
                yield exit_layer, self._head(given[0].hidden if adapter is None else adapter(given[0].hidden, given))
        self._given.clear()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """While entered, what FSDP2 shares out of `model` besides its layers (embedding, final norm, head) is whole.

    Inside the model's own forward it is anyway; a head that is called after it needs this, on all processes at once.
    Other models are left as they are.
    """
    if not hasattr(model, "unshard"):
        yield
        return
    model.unshard()  # type: ignore[operator]
    try:
        yield
    finally:
        model.reshard()  # type: ignore[operator]
