"""The loss of one micro-step: the last layer's and the active exits', each by its weight, and the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from layerskip.model.adapters import Adapters
from layerskip.model.exit_layers import ExitAdapter, ExitBlocks, Given
from layerskip.model.views import Head
from layerskip.training.curriculum import active_exits
from layerskip.training.loss import exit_weights, shifted_labels
from layerskip.training.objective import KEPT_SHARE, Positions, choose_positions, exit_loss, num_chunks, reference_loss
from layerskip.training.recipe import Recipe
from layerskip.training.reference import Reference


class Moment(NamedTuple):
    """Where training is at a forward; see `Handle.set_step`."""

    step: int = 0
    first_row: int = 0
    own_text: bool = False


@lru_cache(maxsize=8)  # asked at every layer, for a step or two at a time
def step_weights(recipe: Recipe, num_layers: int, step: int, own_text: bool) -> dict[int, float]:
    """Exits in the loss at a step and their weights, which sum to 1, ascending; L is the model itself."""
    exits = active_exits(recipe, num_layers, step)
    if own_text:
        exits = tuple(e for e in exits if e < num_layers) or recipe.trained_exits(num_layers)[-1:]
    weights = exit_weights(recipe, exits, num_layers)
    return {exit_layer: weight for exit_layer, weight in weights.items() if weight > 0}


def distilled_share(recipe: Recipe, own_text: bool) -> float:
    """The share of the exits' loss that is from the last layer's output."""
    if not own_text:
        return recipe.self_distillation
    return 0.0 if recipe.freeze_model else 1.0


def exits_suffice(recipe: Recipe, own_text: bool) -> bool:
    """Whether a step's loss has no use for what comes above the exits."""
    return recipe.freeze_model and distilled_share(recipe, own_text) == 0


class StepLoss:
    """Takes the place of a model's loss function in training mode.

    Args:
        model: what is trained.
        num_layers: of it.
        adapters: of its exits; None: they have none.
        reference: the original that `recipe.reference_weight` holds the last layer to.
        own: the model's own loss function, for the last layer.

    Attributes:
        losses: exit -> its loss in the last call, L the model's own; detached.
        reference_loss: KL to the original in the last call, if asked for; detached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers: int,
        recipe: Recipe,
        adapters: Adapters | None,
        reference: Reference | None,
        own: Callable[..., Tensor],
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self.reference_loss: Tensor | None = None
        self.head = Head(model)
        self._model, self._num_layers, self._recipe = model, num_layers, recipe
        self._adapters, self._reference, self._own = adapters, reference, own

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        at: Moment,
        given: Mapping[int, Given],
        inputs: Mapping[str, Any],
        **kwargs: Any,
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            logits: (batch, length, vocab) of the last layer.
            labels: (batch, length) token ids, IGNORE_INDEX where not counted, not shifted.
            given: layer -> what it was given in this forward, for those that an exit needs.
            inputs: of this forward, for the reference.
            kwargs: what transformers hands to a loss function.
        """
        recipe, last = self._recipe, self._num_layers
        positions = self._positions(labels, at, **kwargs)
        chunks = num_chunks(labels.shape[0], labels.shape[1], recipe.exit_loss_positions, logits.shape[-1])
        weights = step_weights(recipe, last, at.step, at.own_text)
        recompute = self._recompute(weights, at)
        total: Tensor | float = 0.0
        losses = {}
        # The last layer first: backward goes the other way round, so that the exits, which need its logits, are done
        # with before its own gradient makes the peak of the step's memory.
        for exit_layer, weight in reversed(weights.items()):
            if exit_layer == last and not positions.weight.any():
                loss = 0.0 * logits.sum()  # transformers divides by the number of labels
            elif exit_layer == last:
                loss = self._own(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
            else:
                needed = self._needed(exit_layer, given)
                loss = self._of_exit(exit_layer, needed, logits, positions, chunks, recompute, at)
            losses[exit_layer] = loss.detach()
            total = total + weight * loss
        self.losses = dict(sorted(losses.items()))
        self.reference_loss = None
        if self._reference is not None and not at.own_text:
            original = self._reference.logits(inputs, positions.places, chunks)
            guard = reference_loss(logits, original, positions)
            self.reference_loss = guard.detach()
            total = total + recipe.reference_weight * guard
        assert isinstance(total, Tensor)
        return total + 0.0 * self._idle(logits, given)

    def layers_needed(self, exit_layer: int) -> range:
        """Whose inputs an exit's loss needs: the layer after it, or the layers whose places its blocks take."""
        return range(exit_layer, exit_layer + (self._recipe.adapter_blocks or 1))

    def _needed(self, exit_layer: int, given: Mapping[int, Given]) -> list[Given]:
        return [given[layer] for layer in self.layers_needed(exit_layer)]

    def _recompute(self, weights: Mapping[int, float], at: Moment) -> bool:
        """Whether the exits' logits are too many to keep for backward; where the last layer's do not exist, not."""
        num_early = len(weights) - (self._num_layers in weights)
        kept = 1.0 if exits_suffice(self._recipe, at.own_text) else KEPT_SHARE
        return self._recipe.exit_loss_positions * num_early > kept

    def _positions(
        self,
        labels: Tensor,
        at: Moment,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Positions:
        targets = shifted_labels(labels) if shift_labels is None else shift_labels
        key = ("positions", self._recipe.seed, at.step)
        return choose_positions(targets, self._recipe.exit_loss_positions, num_items_in_batch, at.first_row, *key)

    def _of_exit(
        self,
        exit_layer: int,
        given: list[Given],
        last_logits: Tensor,
        positions: Positions,
        chunks: int,
        recompute: bool,
        at: Moment,
    ) -> Tensor:
        adapter = None if self._adapters is None else self._adapters[str(exit_layer)]
        head, hidden = self.head, given[0].hidden
        if isinstance(adapter, ExitBlocks):  # their attention reads all positions; others take them chunk by chunk
            hidden, adapter = adapter(hidden, given), None
        return exit_loss(
            hidden,
            head if adapter is None else lambda states: head(adapter(states)),
            last_logits,
            positions,
            chunks,
            distillation=distilled_share(self._recipe, at.own_text),
            temperature=self._recipe.distillation_temperature,
            recompute=recompute,
        )

    def _idle(self, logits: Tensor, given: Mapping[int, Given]) -> Tensor | float:
        """A sum over what the step's loss does not depend on, where an engine would miss its gradient."""
        idle: Tensor | float = 0.0
        if self._adapters is not None:  # called as modules, so that sharded weights are there
            for name, adapter in self._adapters.items():
                if int(name) in self.losses:
                    continue
                if isinstance(adapter, ExitAdapter):
                    idle = idle + adapter(logits.new_zeros(1, adapter.down.in_features)).sum()
                else:
                    needed = self._needed(int(name), given)
                    idle = idle + adapter(needed[0].hidden, needed).sum()
        trained = not self._recipe.freeze_model and hasattr(next(self._model.parameters()), "ds_id")
        if trained and self._num_layers not in self.losses:
            # ZeRO-3 would step the layers above the deepest exit by the gradient they got the last time.
            idle = idle + logits.sum()
        return idle
