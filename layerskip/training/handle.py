"""What prepare() returns: the recipe at work on one model."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.checkpoint.settings import carry
from layerskip.model.adapters import Adapters, attach_adapters, drop_other_adapters, own_weights
from layerskip.model.anatomy import anatomy, decoder_layers, unwrap
from layerskip.model.exit_layers import Given
from layerskip.model.views import layers_return_tuples, listen
from layerskip.training.dropout import Decision, DropoutHooks, dropout_rates, keep_decisions
from layerskip.training.recipe import Recipe
from layerskip.training.reference import INPUTS, Reference
from layerskip.training.shortcut import Shortcut
from layerskip.training.step_loss import Moment, StepLoss, exits_suffice, step_weights


class Handle:
    """The recipe hung on a model by hooks and by the model's own loss function. See `layerskip.prepare`.

    In training mode a forward with labels gives the LayerSkip loss; in evaluation mode nothing is dropped and
    the loss is the model's own.

    Tell it the step before every forward (`set_step`). If it is never told, each training forward counts as one.

    `copy.deepcopy(model)`, as for an average of the weights, is an ordinary model without the recipe.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, reference: nn.Module | None = None) -> None:
        self.model = unwrap(model)
        if hasattr(self.model, "_layerskip_handle"):
            raise ValueError("this model already has a recipe: call handle.remove() first")
        self.recipe = recipe
        layers = decoder_layers(self.model)
        self.num_layers = len(layers)
        recipe.check(self.num_layers)
        self._at, self._told, self._forwards = Moment(), False, 0
        self._has_loss, self._warned = True, False
        self._keep: Tensor | None = None  # (L, rows) of the current micro-step
        self._given: dict[int, Given] = {}  # by layer, from the exits on: what it was given
        self._inputs: dict[str, Any] = {}  # of the current forward, for the reference
        original = Reference(self.model, reference) if recipe.reference_weight > 0 else None
        self._shortcut = Shortcut(layers, recipe.freeze_model and layers_return_tuples(self.model))
        self.adapters: Adapters | None = None
        if recipe.freeze_model:
            self.model.requires_grad_(False)
        elif not any(weight.requires_grad for weight in own_weights(self.model)):
            raise ValueError(
                "no weight of this model learns (requires_grad), and the recipe trains it: an earlier recipe may have "
                "frozen it. Call model.requires_grad_(True), or take a recipe with freeze_model=True"
            )
        if not recipe.has_adapters:
            drop_other_adapters(self.model)
        else:
            exits = recipe.trained_exits(self.num_layers)
            self.adapters = attach_adapters(self.model, exits, recipe.adapter_rank, recipe.adapter_blocks, recipe.seed)
        self._base_loss = self.model.loss_function
        self._step_loss = StepLoss(self.model, self.num_layers, recipe, self.adapters, original, self._base_loss)
        self._hang(layers)
        self.model._layerskip_handle = self
        carry(self.model.config, recipe=recipe.to_dict())

    def set_step(self, step: int, first_row: int = 0, own_text: bool = False) -> None:
        """Say where training is, before a forward.

        Args:
            step: optimizer step, from 0.
            first_row: place of this forward's first sample among all samples of the step, over all micro-steps and
                processes: (micro_step * processes + process) * rows, if every forward has as many rows.
            own_text: the batch is the model's own text. The exits learn to follow the last layer, wholly by
                self-distillation, and the last layer is left out of the loss. Where the model is frozen the text itself
                is what it says, greedily or as a sample, so the exits learn from that and later layers are not run.
        """
        self._at, self._told, self._keep = Moment(step, first_row, own_text), True, None

    @property
    def losses(self) -> dict[int, Tensor]:
        """Exit -> its loss in the last training forward, L the model's own; detached scalars."""
        return self._step_loss.losses

    @property
    def reference_loss(self) -> Tensor | None:
        """KL of the last layer to the original in the last training forward, if the recipe asks for it."""
        return self._step_loss.reference_loss

    @property
    def weights(self) -> dict[int, float]:
        """Exits in the loss at this step and their weights, which sum to 1; L is the model itself."""
        return dict(step_weights(self.recipe, self.num_layers, self._at.step, self._at.own_text))

    @property
    def active_exits(self) -> tuple[int, ...]:
        """Exits in the loss at this step, ascending."""
        return tuple(self.weights)

    @property
    def dropout_rates(self) -> tuple[float, ...]:
        """Rate of every layer at this step."""
        return dropout_rates(self.recipe, self.num_layers, self._at.step)

    def compute_loss(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        """The loss of the forward that gave `outputs` without being told the labels: a Trainer's `compute_loss_func`.

        TRL's SFTTrainer needs it, which computes a loss of its own otherwise; where the model is given labels,
        `model(...).loss` is the same.

        Args:
            outputs: what the model returned; it has logits (batch, length, vocab).
            labels: (batch, length) token ids, -100 where not counted, not shifted.
        """
        logits, config = outputs["logits"], self.model.config
        kwargs["num_items_in_batch"] = num_items_in_batch
        loss = self._loss(logits, labels.to(logits.device), logits.shape[-1], **kwargs)
        if outputs.get("aux_loss") is not None:  # experts' balance, which models add where they are given labels
            loss = loss + config.router_aux_loss_coef * outputs["aux_loss"].to(loss.device)
        return loss

    def remove(self) -> None:
        """Take everything off the model, but for the recipe in its config. A frozen target stays frozen and keeps its
        adapters, which it drafts with."""
        self._shortcut.close()
        del self.model.__deepcopy__
        self._take_off(self.model, self._hooks)

    def _take_off(self, model: nn.Module, hooks: list[Any]) -> None:
        for hook in hooks:
            hook.remove()
        model.loss_function = self._base_loss
        del model._layerskip_handle

    def _copy_model(self, memo: dict[int, Any]) -> nn.Module:
        """The model's `__deepcopy__`. Hooks copied with it would belong to a half-copied recipe: they are taken off."""
        self._shortcut.close()
        memo[id(self)] = self  # not copied: it may hold a reference as large as the model
        del self.model.__deepcopy__
        try:
            copied = copy.deepcopy(self.model, memo)
        finally:
            self.model.__deepcopy__ = self._copy_model
        self._take_off(copied, copy.deepcopy(self._hooks, memo))
        return copied

    def _hang(self, layers: list[nn.Module]) -> None:
        self._hooks = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        if self.recipe.max_dropout > 0:
            for index, layer in enumerate(layers):
                self._hooks += DropoutHooks(layer, partial(self._decide, index)).handles
        exits, needed = self.recipe.trained_exits(self.num_layers), self._step_loss.layers_needed
        for index in sorted({layer for exit_layer in exits for layer in needed(exit_layer)}):
            self._hooks.append(listen(layers[index], partial(self._tap, index)))
            self._hooks.append(layers[index].register_forward_hook(self._step_loss.head.watch))
        if self.recipe.freeze_model:
            self._hooks.append(self.model.register_forward_hook(self._end, always_call=True))
        self.model.loss_function = self._loss
        self.model.__deepcopy__ = self._copy_model

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        self._given.clear()
        self._shortcut.close()
        if not (model.training and torch.is_grad_enabled()):
            return None
        self._warn_without_loss()
        self._has_loss = False
        if not self._told:
            self._at, self._keep = Moment(self._forwards), None
            self._forwards += 1
        if self.recipe.reference_weight > 0:
            self._inputs = {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}
            if args:
                self._inputs["input_ids"] = args[0]
        if not exits_suffice(self.recipe, self._at.own_text):
            return None
        self._shortcut.open(max(self.active_exits))
        if not anatomy(self.model).keeps_logits or kwargs.get("labels") is None:
            return None
        return args, {**kwargs, "logits_to_keep": 1}  # of the last layer's nobody asks

    def _end(self, *_: Any) -> None:
        self._shortcut.close()

    def _warn_without_loss(self) -> None:
        if not self._has_loss and not self._warned:
            self._warned = True
            warnings.warn(
                "a training forward whose loss was not asked of the recipe: the exits learnt nothing from it. Pass "
                "labels to the model, or give the Trainer compute_loss_func=handle.compute_loss (TRL's needs it)",
                stacklevel=2,
            )

    def _decide(self, layer: int, rows: int) -> Decision | None:
        rate, recipe = self.dropout_rates[layer], self.recipe
        if rate == 0:
            return None
        if self._keep is None or self._keep.shape[1] != rows:
            self._keep = keep_decisions(
                self.dropout_rates, rows, recipe.seed, self._at.step, self._at.first_row, per=recipe.dropout_per
            )
        return Decision(self._keep[layer], 1 / (1 - rate) if recipe.dropout_rescale and rate < 1 else 1.0)

    def _tap(self, index: int, given: Given) -> None:
        if self.model.training:
            self._given[index] = given

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        """The model's loss function while the recipe hangs on it: (batch, length, vocab) logits of the last layer."""
        self._has_loss = True
        if not self.model.training:
            return self._base_loss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        try:
            return self._step_loss(logits, labels, vocab_size, self._at, self._given, self._inputs, **kwargs)
        finally:
            self._given.clear()
