"""What an exit is worth: its loss and agreement on held-out text, and the speed-up that follows from them."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from layerskip.anatomy import num_layers
from layerskip.forecast import Costs, ExitMeasurement, Forecast, best_setting, measure_costs, measure_exits
from train.blocks import IGNORED, Mixture
from train.config import TrainConfig
from train.console import Reporter
from train.continuations import continue_prompts, end_ids
from train.engine import autocast, is_sharded
from train.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COSTS_CONTEXT = 128  # cached tokens when the stages are timed
_CONTINUATIONS = 16  # held-out blocks whose beginnings the model continues, to choose a setting on


@dataclass(frozen=True)
class Evaluation:
    """Every exit on one held-out split."""

    last_loss: float  # nats per token
    exits: dict[int, ExitMeasurement]  # by exit layer, the last layer not among them
    forecasts: list[Forecast]  # best first; empty if the stages were not timed

    def best_of(self, exit_layer: int) -> Forecast | None:
        """The best forecast for one exit layer."""
        return next((forecast for forecast in self.forecasts if forecast.exit_layer == exit_layer), None)

    def record(self) -> dict[str, Any]:
        """For JSON: {"last": {"loss"}, "exits": {"2": {"loss", "agreement", "overlap", "speedup", ...}}}."""
        exits: dict[str, dict[str, float]] = {}
        for exit_layer, measured in self.exits.items():
            numbers = {"loss": measured.loss, "agreement": measured.agreement, "overlap": measured.overlap}
            if (best := self.best_of(exit_layer)) is not None:
                numbers["num_draft_tokens"] = best.num_draft_tokens
                numbers["mean_acceptance_length"] = best.mean_acceptance_length
                numbers["speedup"] = best.speedup
            exits[str(exit_layer)] = numbers
        return {"last": {"loss": self.last_loss}, "exits": exits}


class Evaluator:
    """Measures the exits that the recipe trains (all, if it names none)."""

    def __init__(self, accelerator: Accelerator, model: "PreTrainedModel", config: TrainConfig) -> None:
        """Time the stages of `model`, before anything hangs on it, in the dtype it will decode in.

        Weights do not matter to time, so this is done once, when memory is still free. Sharded engines have
        no whole model to time: then there are no forecasts, and no setting is chosen
        afterwards.
        """
        self.accelerator, self.config, self.num_layers = accelerator, config, num_layers(model)
        self.exits = config.recipe.exits or tuple(range(1, self.num_layers))
        self.costs: Costs | None = None
        if accelerator.is_main_process and not is_sharded(accelerator):
            dtype = getattr(torch, config.model.dtype)
            timed: torch.nn.Module = copy.deepcopy(model)
            timed.to(device=accelerator.device, dtype=dtype)
            context = min(_COSTS_CONTEXT, config.data.sequence_length // 2)
            self.costs = measure_costs(timed, self.exits, context=context)

    def measure(self, model: torch.nn.Module, blocks: Mixture) -> Evaluation:
        """All exits on at most `data.evaluation_blocks` blocks.

        Every process reads the same blocks: a sharded model needs all of them in each forward, and a whole
        one is done no later. Forecasts are the first process's alone.
        """
        device = self.accelerator.device
        batches = blocks.batches(self.config.optim.micro_batch_size, self.config.data.evaluation_blocks)
        with autocast(self.accelerator, self.config):
            measured = measure_exits(model, (batch.inputs(device) for batch in batches), self.exits)
        last = measured.pop(self.num_layers)
        return Evaluation(last.loss, measured, best_setting(measured, self.costs) if self.costs else [])

    def forecast(self, model: "PreTrainedModel", blocks: Mixture) -> list[Forecast]:
        """Every setting, best first, as it would do on the model's own greedy continuations of held-out text.

        A model's own text is what its exits will have to follow, and it is unlike other text: a small model
        repeats itself, which its first layers may or may not be able to copy. Empty if there are no costs.
        """
        if self.costs is None:
            return []
        prompts = blocks.prompts(_CONTINUATIONS)
        ends = end_ids(model, None)
        length = max(8, self.config.data.sequence_length - max(map(len, prompts)))
        with autocast(self.accelerator, self.config):
            texts = continue_prompts(model, prompts, length, ends[0] if ends else 0, ends, min_new_tokens=2)
            pairs = zip(prompts, texts, strict=True)
            rows = [_continued(prompt, text, self.accelerator.device) for prompt, text in pairs]
            measured = measure_exits(model, rows, self.exits)
        return best_setting(measured, self.costs)


def _continued(prompt: torch.Tensor, text: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """A prompt and its continuation as one row, (1, length) each, of which the continuation counts."""
    ids = torch.cat([prompt, text]).to(device)[None]
    labels = ids.clone()
    labels[:, : len(prompt)] = IGNORED
    return {"input_ids": ids, "labels": labels}


def report(evaluation: Evaluation, split: str, step: int, reporter: Reporter, tracker: Tracker) -> None:
    """Show an evaluation as a table and log it."""
    rows = []
    for exit_layer, measured in evaluation.exits.items():
        best = evaluation.best_of(exit_layer)
        forecast = (
            [str(best.num_draft_tokens), f"{best.mean_acceptance_length:.2f}", f"{best.speedup:.2f}x"]
            if best
            else ["-", "-", "-"]
        )
        shares = [f"{measured.agreement:.3f}", f"{measured.overlap:.3f}"]
        rows.append([str(exit_layer), f"{measured.loss:.3f}", *shares, *forecast])
    title = f"{split} after {step} steps: loss of the last layer {evaluation.last_loss:.3f}"
    columns = ["exit", "loss", "agreement", "overlap", "drafts", "tokens/verify", "forecast"]
    reporter.table(title, columns, rows)
    tracker.log(step, split, evaluation.record())
