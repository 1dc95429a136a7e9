"""What prepare() returns: the recipe at work on one model."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.anatomy import decoder_layers, unwrap
from layerskip.curriculum import active_exits
from layerskip.dropout import DropoutHooks, dropout_rates, keep_decisions
from layerskip.loss import exit_weights, shifted_labels, soft_cross_entropy
from layerskip.recipe import Recipe
from layerskip.views import Head

CONFIG_KEY = "layerskip"


class Handle:
    """The recipe hung on a model by hooks and by the model's own loss function. See `layerskip.prepare`.

    In training mode a forward with labels gives the LayerSkip loss; in evaluation mode nothing is dropped and
    the loss is the model's own.

    Tell it the step before every forward (`set_step`). If it is never told, each training forward counts as one.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = unwrap(model)
        if hasattr(self.model, "_layerskip_handle"):
            raise ValueError("this model already has a recipe: call handle.remove() first")
        self.recipe = recipe
        layers = decoder_layers(self.model)
        self.num_layers = len(layers)
        recipe.check(self.num_layers)
        self.losses: dict[int, Tensor] = {}
        self._step, self._micro_step, self._first_row = 0, 0, 0
        self._told, self._own_text, self._forwards = False, False, 0
        self._has_loss, self._warned = False, False
        self._keep: Tensor | None = None  # (L, rows) of the current micro-step
        self._taps: dict[int, Tensor] = {}  # exit -> (batch, length, hidden_size)
        self._head = Head(self.model)
        self._base_loss = self.model.loss_function
        self._hang(layers)
        self.model._layerskip_handle = self
        carried = dict(getattr(self.model.config, CONFIG_KEY, None) or {})
        setattr(self.model.config, CONFIG_KEY, {**carried, "recipe": recipe.to_dict()})

    def set_step(self, step: int, micro_step: int = 0, first_row: int = 0, own_text: bool = False) -> None:
        """Say where training is, before a forward.

        Args:
            step: optimizer step, from 0.
            micro_step: which forward of the step's accumulation window.
            first_row: index, in the batch over all processes, of this process's first sample.
            own_text: the batch is the model's own text. The exits learn to follow the last layer, wholly by
                self-distillation, and the last layer is left out of the loss.
        """
        self._told, self._own_text = True, own_text
        self._step, self._micro_step, self._first_row = step, micro_step, first_row
        self._keep = None

    @property
    def active_exits(self) -> tuple[int, ...]:
        """Exits in the loss at this step; L is the model itself."""
        exits = active_exits(self.recipe, self.num_layers, self._step)
        return tuple(e for e in exits if e < self.num_layers) or exits if self._own_text else exits

    @property
    def dropout_rates(self) -> tuple[float, ...]:
        """Rate of every layer at this step."""
        return dropout_rates(self.recipe, self.num_layers, self._step)

    def remove(self) -> None:
        """Take everything off the model, but for the recipe in its config."""
        for handle in self._hooks:
            handle.remove()
        self.model.loss_function = self._base_loss
        del self.model._layerskip_handle

    def _hang(self, layers: list[nn.Module]) -> None:
        self._hooks = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end),
        ]
        for index, layer in enumerate(layers):
            if self.recipe.max_dropout > 0:
                self._hooks += DropoutHooks(layer, partial(self._kept, index)).handles
            if index + 1 < self.num_layers:
                self._hooks.append(layer.register_forward_hook(partial(self._tap, index + 1)))
        self.model.loss_function = self._loss

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._taps.clear()
        self._has_loss = False
        if model.training and torch.is_grad_enabled() and not self._told:
            self._step, self._keep = self._forwards, None
            self._forwards += 1

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled() and not self._has_loss and not self._warned:
            self._warned = True
            warnings.warn(
                "a training forward without labels: the exits learn nothing from it. Pass labels to the model "
                "(in a Trainer leave label_smoothing_factor and compute_loss_func out)",
                stacklevel=2,
            )

    def _kept(self, layer: int, rows: int) -> Tensor | None:
        rates = self.dropout_rates
        if rates[layer] == 0:
            return None
        if self._keep is None or self._keep.shape[1] != rows:
            self._keep = keep_decisions(rates, rows, self.recipe.seed, self._step, self._micro_step, self._first_row)
        return self._keep[layer]

    def _tap(self, exit_layer: int, layer: nn.Module, args: Any, output: Any) -> None:
        if layer.training and exit_layer in self.active_exits:
            self._head.returns_tuple = isinstance(output, tuple)
            self._taps[exit_layer] = output[0] if isinstance(output, tuple) else output

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        """The model's loss function while the recipe hangs on it: (batch, length, vocab) logits of the last layer."""
        self._has_loss = True
        if not self.model.training:
            return self._base_loss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        base = partial(self._base_loss, labels=labels, vocab_size=vocab_size, **kwargs)
        weights = exit_weights(self.recipe, self.active_exits, self.num_layers)
        total: Tensor | float = 0.0
        self.losses = {}
        for exit_layer, weight in weights.items():
            if exit_layer == self.num_layers:
                loss = base(logits=logits)
            else:
                loss = self._exit_loss(self._taps.pop(exit_layer), logits, labels, base, kwargs)
            self.losses[exit_layer] = loss.detach()
            total = total + weight * loss
        assert isinstance(total, Tensor)
        return total

    def _exit_loss(
        self, hidden: Tensor, last_logits: Tensor, labels: Tensor, base: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        logits = self._head(hidden)
        share = 1.0 if self._own_text else self.recipe.self_distillation
        loss: Tensor | float = (1 - share) * base(logits=logits) if share < 1 else 0.0
        if share > 0:
            targets = kwargs["shift_labels"] if kwargs.get("shift_labels") is not None else shifted_labels(labels)
            loss = loss + share * soft_cross_entropy(logits, last_logits, targets, kwargs.get("num_items_in_batch"))
        assert isinstance(loss, Tensor)
        return loss
