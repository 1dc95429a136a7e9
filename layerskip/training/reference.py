"""The model as it was before training, to hold its last layer to: KL(original || trained), as in RLHF.

A frozen copy; or, where the model is trained through LoRA, the model itself with its adapters off, which costs no
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.model.anatomy import anatomy, decoder_layers, unwrap
from layerskip.model.views import Head, Spy, silent, with_layers

INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")


class Reference:
    """The original of `model`: `original` where given, else `model` itself with LoRA off, else a copy of it as it is,
    before anything is hung on it."""

    def __init__(self, model: PreTrainedModel, original: nn.Module | None = None) -> None:
        self._tuned = [] if original else [m for m in model.modules() if hasattr(m, "_disable_adapters")]
        frozen = unwrap(original) if original else model if self._tuned else copy.deepcopy(model)
        self.model = frozen if self._tuned else frozen.to(model.device).eval().requires_grad_(False)
        layers = decoder_layers(self.model)
        self._spy = Spy(layers[-1])
        self._view = with_layers(self.model, anatomy(self.model).layers_path, [*layers[:-1], self._spy])
        self._head = Head(self.model)

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Any], index: Tensor, chunks: int) -> Tensor:
        """The original's logits (n, vocab) at the places `index` (n,) of the flattened (batch * length) inputs."""
        with self._original():
            keeps = {"logits_to_keep": index[:0]} if anatomy(self.model).keeps_logits else {}
            self._view(**inputs, use_cache=False, return_dict=True, **keeps, **silent(self._view))
            hidden, self._spy.hidden = self._spy.hidden, None
            assert hidden is not None
            self._head.returns_tuple = self._spy.returns_tuple
            states = hidden.flatten(0, 1)[index]
            return torch.cat([self._head(piece[:, None])[:, 0] for piece in states.tensor_split(chunks)])

    @contextmanager
    def _original(self) -> Iterator[None]:
        """LoRA off and evaluation mode for a moment, where the model itself is the reference."""
        if not self._tuned:
            yield
            return
        training = self.model.training
        before = [module._disable_adapters for module in self._tuned]
        _switch(self._tuned, [True] * len(before))
        self.model.eval()
        try:
            yield
        finally:
            _switch(self._tuned, before)
            self.model.train(training)


def _switch(modules: list[nn.Module], off: list[bool]) -> None:
    for module, value in zip(modules, off, strict=True):
        module._disable_adapters = value  # type: ignore[assignment]
