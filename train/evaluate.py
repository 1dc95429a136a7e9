"""What an exit is worth: its loss and agreement on held-out text, and the speed-up that follows from them."""

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from layerskip.forecast import ExitMeasurement, Forecast, StageCosts, best_setting, measure_costs, measure_exits
from train.config import TrainConfig
from train.engine import autocast, is_sharded
from train.packing import Blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COSTS_CONTEXT = 128  # cached tokens when the stages are timed: a short answer's middle


@dataclass(frozen=True)
class Evaluation:
    """Every exit on one held-out split."""

    last_loss: float  # nats per token, last layer
    exits: dict[int, ExitMeasurement]  # by exit layer, without the last
    forecasts: list[Forecast]  # best first; empty if the stages were not timed

    def best_of(self, exit_layer: int) -> Forecast | None:
        """The best forecast for one exit layer."""
        return next((f for f in self.forecasts if f.exit_layer == exit_layer), None)

    def record(self) -> dict[str, Any]:
        """As JSON: {"last": {"loss"}, "exits": {"2": {"loss", "agreement", "overlap", ...}}}."""
        exits: dict[str, dict[str, float]] = {}
        for exit_layer, measured in self.exits.items():
            numbers = {"loss": measured.loss, "agreement": measured.agreement, "overlap": measured.overlap}
            if (best := self.best_of(exit_layer)) is not None:
                numbers["num_draft_tokens"] = best.num_draft_tokens
                numbers["mean_acceptance_length"] = best.mean_acceptance_length
                numbers["speedup"] = best.speedup
            exits[str(exit_layer)] = numbers
        return {"last": {"loss": self.last_loss}, "exits": exits}
