"""Means of the losses between two lines of metrics, kept on the device so that no step waits for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor


class Meter:
    """Sums of losses over micro-batches, each a share of its step's mean (divided by all targets)."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        """An exit's sum is kept at its index (1 … L), the total loss at index 0, the guard's at the last."""
        self._num_layers = num_layers
        self._sums = torch.zeros(num_layers + 2, device=device)
        self.step_loss = torch.zeros((), device=device)  # this process's share of the step's loss so far
        self._counts = [0] * (num_layers + 2)  # steps in which each was part of the loss
        self._guarded = False
        self._seconds = 0.0
        self._dropout = 0.0  # sum over steps of the mean rate

    def add(self, loss: Tensor, exit_losses: Mapping[int, Tensor], reference: Tensor | None = None) -> None:
        """Count one micro-batch: its loss (a scalar), those of the exits in it, and the KL to the original model."""
        self.step_loss += loss.detach()
        if reference is not None:
            self._sums[-1] += reference
            self._guarded = True
        for index, exit_loss in exit_losses.items():
            self._sums[index] += exit_loss

    def end_step(self, active_exits: Sequence[int], seconds: float, dropout_rates: Sequence[float] = ()) -> None:
        """The optimizer step is done; it took `seconds`, at these dropout rates of the layers."""
        self._sums[0] += self.step_loss
        self.step_loss = torch.zeros_like(self.step_loss)
        for index in (0, *active_exits, *([self._num_layers + 1] if self._guarded else [])):
            self._counts[index] += 1
        self._guarded = False
        self._seconds += seconds
        self._dropout += sum(dropout_rates) / max(1, len(dropout_rates))

    def read(self, accelerator: Accelerator, tokens_per_step: int) -> dict[str, Any]:
        """Means since the last call, over all processes, which all call this: loss, exits, tokens_per_second.

        "exits" holds every exit that was active, over the steps in which it was; the last layer is "last";
        "reference" is there where the recipe guards it. "schedule" is what the recipe did: the mean dropout rate of
        a layer, how many early exits a step trained, and the share of the steps in which each was active.
        """
        sums = accelerator.reduce(self._sums, reduction="sum").tolist()
        steps = self._counts[0]
        active = {str(i): count / steps for i, count in enumerate(self._counts) if 0 < i < self._num_layers and count}
        schedule = {"mean_dropout": self._dropout / steps, "active_exits": sum(active.values()), "active": active}
        means = {i: sums[i] / count for i, count in enumerate(self._counts) if count}
        rate = tokens_per_step * steps / self._seconds
        self._sums.zero_()
        self._counts, self._seconds, self._dropout = [0] * len(self._counts), 0.0, 0.0
        last = {"last": means.pop(self._num_layers)} if self._num_layers in means else {}
        guard = {"reference": means.pop(self._num_layers + 1)} if self._num_layers + 1 in means else {}
        loss = means.pop(0)
        return {
            "loss": loss,
            **last,
            **guard,
            "exits": {str(i): m for i, m in means.items()},
            "schedule": schedule,
            "tokens_per_second": rate,
        }
