"""What prepare() returns: the recipe at work on one model."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.checkpoint.settings import carry
from layerskip.model.adapters import Adapters, attach_adapters, drop_other_adapters
from layerskip.model.anatomy import anatomy, decoder_layers, unwrap
from layerskip.model.exit_layers import ExitAdapter, ExitBlocks, Given
from layerskip.model.views import Head, layers_return_tuples, listen
from layerskip.training.curriculum import active_exits
from layerskip.training.dropout import Decision, DropoutHooks, dropout_rates, keep_decisions
from layerskip.training.loss import exit_weights, shifted_labels
from layerskip.training.objective import KEPT_SHARE, Positions, choose_positions, exit_loss, num_chunks, reference_loss
from layerskip.training.recipe import Recipe
from layerskip.training.reference import INPUTS, Reference
from layerskip.training.shortcut import Shortcut


@lru_cache(maxsize=8)  # asked at every layer, for a step or two at a time
def _weights(recipe: Recipe, num_layers: int, step: int, own_text: bool) -> dict[int, float]:
    exits = active_exits(recipe, num_layers, step)
    if own_text:
        exits = tuple(e for e in exits if e < num_layers) or exits
    weights = exit_weights(recipe, exits, num_layers)
    return {exit_layer: weight for exit_layer, weight in weights.items() if weight > 0}


class Handle:
    """The recipe hung on a model by hooks and by the model's own loss function. See `layerskip.prepare`.

    In training mode a forward with labels gives the LayerSkip loss; in evaluation mode nothing is dropped and
    the loss is the model's own.

    Tell it the step before every forward (`set_step`). If it is never told, each training forward counts as one.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, reference: nn.Module | None = None) -> None:
        self.model = unwrap(model)
        if hasattr(self.model, "_layerskip_handle"):
            raise ValueError("this model already has a recipe: call handle.remove() first")
        self.recipe = recipe
        layers = decoder_layers(self.model)
        self.num_layers = len(layers)
        recipe.check(self.num_layers)
        self.losses: dict[int, Tensor] = {}  # exit -> its loss in the last training forward, L the model's own
        self.reference_loss: Tensor | None = None  # KL to the original in the last training forward, if asked for
        self._step, self._micro_step, self._first_row = 0, 0, 0
        self._told, self._own_text, self._forwards = False, False, 0
        self._has_loss, self._warned = True, False
        self._keep: Tensor | None = None  # (L, rows) of the current micro-step
        self._given: dict[int, Given] = {}  # by layer, from the exits on: what it was given
        self._inputs: dict[str, Any] = {}  # of the current forward, for the reference
        self._head = Head(self.model)
        self._reference = Reference(self.model, reference) if recipe.reference_weight > 0 else None
        self.adapters: Adapters | None = None
        if recipe.freeze_model:
            self.model.requires_grad_(False)
        if not recipe.has_adapters:
            drop_other_adapters(self.model)
        else:
            exits = recipe.trained_exits(self.num_layers)
            self.adapters = attach_adapters(self.model, exits, recipe.adapter_rank, recipe.adapter_blocks, recipe.seed)
        self._shortcut = Shortcut(layers, recipe.freeze_model and layers_return_tuples(self.model))
        self._base_loss = self.model.loss_function
        self._hang(layers)
        self.model._layerskip_handle = self
        carry(self.model.config, recipe=recipe.to_dict())

    def set_step(self, step: int, micro_step: int = 0, first_row: int = 0, own_text: bool = False) -> None:
        """Say where training is, before a forward.

        Args:
            step: optimizer step, from 0.
            micro_step: which forward of the step's accumulation window.
            first_row: index, in the batch over all processes, of this process's first sample.
            own_text: the batch is the model's own text. The exits learn to follow the last layer, wholly by
                self-distillation, and the last layer is left out of the loss. Where the model is frozen the text itself
                is what it says, greedily or as a sample, so the exits learn from that and later layers are not run.
        """
        self._told, self._own_text = True, own_text
        self._step, self._micro_step, self._first_row = step, micro_step, first_row
        self._keep = None

    @property
    def weights(self) -> dict[int, float]:
        """Exits in the loss at this step and their weights, which sum to 1; L is the model itself."""
        return dict(_weights(self.recipe, self.num_layers, self._step, self._own_text))

    @property
    def active_exits(self) -> tuple[int, ...]:
        """Exits in the loss at this step, ascending."""
        return tuple(self.weights)

    @property
    def dropout_rates(self) -> tuple[float, ...]:
        """Rate of every layer at this step."""
        return dropout_rates(self.recipe, self.num_layers, self._step)

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
        for handle in self._hooks:
            handle.remove()
        self._shortcut.close()
        self.model.loss_function = self._base_loss
        del self.model._layerskip_handle

    def _hang(self, layers: list[nn.Module]) -> None:
        self._hooks = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        if self.recipe.max_dropout > 0:
            for index, layer in enumerate(layers):
                self._hooks += DropoutHooks(layer, partial(self._decide, index)).handles
        exits, blocks = self.recipe.trained_exits(self.num_layers), self.recipe.adapter_blocks or 1
        for index in sorted({exit_layer + i for exit_layer in exits for i in range(blocks)}):
            self._hooks.append(listen(layers[index], partial(self._tap, index)))
            self._hooks.append(layers[index].register_forward_hook(self._head.watch))
        if self.recipe.freeze_model:
            self._hooks.append(self.model.register_forward_hook(self._end, always_call=True))
        self.model.loss_function = self._loss

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        self._given.clear()
        self._shortcut.close()
        if not (model.training and torch.is_grad_enabled()):
            return None
        self._warn_without_loss()
        self._has_loss = False
        if not self._told:
            self._step, self._keep = self._forwards, None
            self._forwards += 1
        if self._reference is not None:
            self._inputs = {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}
            if args:
                self._inputs["input_ids"] = args[0]
        if not self._exits_suffice:
            return None
        self._shortcut.open(max(self.active_exits))
        if not anatomy(self.model).keeps_logits or kwargs.get("labels") is None:
            return None
        return args, {**kwargs, "logits_to_keep": 1}  # of the last layer's nobody asks

    @property
    def _exits_suffice(self) -> bool:
        """Whether the step's loss has no use for what comes above the exits."""
        return self.recipe.freeze_model and self._distillation == 0

    @property
    def _distillation(self) -> float:
        """The share of the exits' loss that is from the last layer's output, at this step."""
        if not self._own_text:
            return self.recipe.self_distillation
        return 0.0 if self.recipe.freeze_model else 1.0

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
            place = (self._step, self._micro_step, self._first_row)
            self._keep = keep_decisions(self.dropout_rates, rows, recipe.seed, *place, per=recipe.dropout_per)
        return Decision(self._keep[layer], 1 / (1 - rate) if recipe.dropout_rescale and rate < 1 else 1.0)

    def _tap(self, index: int, given: Given) -> None:
        if self.model.training:
            self._given[index] = given

    def _given_at(self, exit_layer: int) -> list[Given]:
        """What the layer after an exit was given, or the layers whose places its blocks take."""
        return [self._given[exit_layer + i] for i in range(self.recipe.adapter_blocks or 1)]

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        """The model's loss function while the recipe hangs on it: (batch, length, vocab) logits of the last layer."""
        self._has_loss = True
        if not self.model.training:
            return self._base_loss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        positions = self._positions(labels, **kwargs)
        chunks = num_chunks(labels.shape[0], labels.shape[1], self.recipe.exit_loss_positions, logits.shape[-1])
        total: Tensor | float = 0.0
        self.reference_loss = None
        losses = {}
        weights = self.weights
        num_early = len(weights) - (self.num_layers in weights)
        recompute = self.recipe.exit_loss_positions * num_early > KEPT_SHARE
        # The last layer first: backward goes the other way round, so that the exits, which need its logits, are done
        # with before its own gradient makes the peak of the step's memory.
        for exit_layer, weight in reversed(weights.items()):
            if exit_layer == self.num_layers:
                loss = self._base_loss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
            else:
                loss = self._exit_loss(exit_layer, logits, positions, chunks, recompute)
            losses[exit_layer] = loss.detach()
            total = total + weight * loss
        self.losses = dict(sorted(losses.items()))
        if self._reference is not None and not self._own_text:
            original = self._reference.logits(self._inputs, positions.places, chunks)
            guard = reference_loss(logits, original, positions)
            self.reference_loss = guard.detach()
            total = total + self.recipe.reference_weight * guard
        assert isinstance(total, Tensor)
        total = total + 0.0 * self._idle(logits)
        self._given.clear()
        return total

    def _idle(self, logits: Tensor) -> Tensor | float:
        """A sum over what the step's loss does not depend on, where an engine would miss its gradient."""
        idle: Tensor | float = 0.0
        if self.adapters is not None:  # called as modules, so that sharded weights are there
            for exit_layer, adapter in self.adapters.items():
                if int(exit_layer) in self.losses:
                    continue
                if isinstance(adapter, ExitAdapter):
                    idle = idle + adapter(logits.new_zeros(1, adapter.down.in_features)).sum()
                else:
                    given = self._given_at(int(exit_layer))
                    idle = idle + adapter(given[0].hidden, given).sum()
        trained = not self.recipe.freeze_model and hasattr(next(self.model.parameters()), "ds_id")
        if trained and self.num_layers not in self.losses:
            # ZeRO-3 would step the layers above the deepest exit by the gradient they got the last time.
            idle = idle + logits.sum()
        return idle

    def _positions(
        self,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Positions:
        targets = shifted_labels(labels) if shift_labels is None else shift_labels
        key = ("positions", self.recipe.seed, self._step, self._micro_step)
        return choose_positions(targets, self.recipe.exit_loss_positions, num_items_in_batch, self._first_row, *key)

    def _exit_loss(
        self, exit_layer: int, last_logits: Tensor, positions: Positions, chunks: int, recompute: bool
    ) -> Tensor:
        adapter = None if self.adapters is None else self.adapters[str(exit_layer)]
        given, head = self._given_at(exit_layer), self._head
        hidden = given[0].hidden
        if isinstance(adapter, ExitBlocks):  # their attention reads all positions; others take them chunk by chunk
            hidden, adapter = adapter(hidden, given), None
        return exit_loss(
            hidden,
            head if adapter is None else lambda states: head(adapter(states)),
            last_logits,
            positions,
            chunks,
            distillation=self._distillation,
            temperature=self.recipe.distillation_temperature,
            recompute=recompute,
        )
