"""What an exit is worth: its loss and agreement on held-out text, and the speed-up that follows from them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from layerskip.forecast import Costs, ExitMeasurement, Forecast, best_setting, measure_exits
from layerskip.model.anatomy import num_layers
from layerskip.training.objective import IGNORE_INDEX
from train.blocks import Mixture
from train.config import TrainConfig
from train.console import Reporter
from train.continuations import continue_prompts, end_ids
from train.costs import stage_costs
from train.engine import autocast, is_sharded
from train.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONTINUATIONS = 16  # held-out blocks whose beginnings the model continues, to choose a setting on


@dataclass(frozen=True)
class Evaluation:
    """Every exit on one held-out split."""

    last_loss: float  # nats per token
    exits: dict[int, ExitMeasurement]  # by exit layer, the last layer not among them
    greedy: list[Forecast]  # best first; empty if the stages were not timed
    sampled: list[Forecast]  # the same for sampling at temperature 1

    def record(self) -> dict[str, Any]:
        """For JSON: {"last": {"loss"}, "exits": {"2": {"loss", "agreement", "overlap", "forecast": {...}}}}.

        "forecast" has the best number of drafts for "greedy" and for "sampled" decoding, and what it should bring:
        {"num_draft_tokens", "mean_acceptance_length", "speedup"}.
        """
        exits: dict[str, dict[str, Any]] = {}
        for exit_layer, measured in self.exits.items():
            numbers: dict[str, Any] = {name: getattr(measured, name) for name in ("loss", "agreement", "overlap")}
            forecast = {
                way: {name: getattr(best, name) for name in _FORECAST}
                for way, forecasts in (("greedy", self.greedy), ("sampled", self.sampled))
                if (best := next((f for f in forecasts if f.exit_layer == exit_layer), None))
            }
            exits[str(exit_layer)] = {**numbers, "forecast": forecast} if forecast else numbers
        return {"last": {"loss": self.last_loss}, "exits": exits}


_FORECAST = ("num_draft_tokens", "mean_acceptance_length", "speedup")


class Evaluator:
    """Measures the exits that the recipe trains."""

    def __init__(self, accelerator: Accelerator, model: "PreTrainedModel", config: TrainConfig) -> None:
        """Time the stages of `model`, before anything hangs on it, in the dtype it will decode in.

        Sharded engines have no whole model to time: then there are no forecasts, and no setting is chosen
        afterwards.
        """
        self.accelerator, self.config, self.num_layers = accelerator, config, num_layers(model)
        self.exits = config.recipe.trained_exits(self.num_layers)
        self.costs: Costs | None = None
        if accelerator.is_main_process and not is_sharded(accelerator):
            self.costs = stage_costs(accelerator, model, config, self.exits)

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
        forecasts = [best_setting(measured, self.costs, sampled=way) if self.costs else [] for way in (False, True)]
        return Evaluation(last.loss, measured, *forecasts)

    def forecast(
        self, model: "PreTrainedModel", blocks: Mixture, draft_vocabulary: torch.Tensor | None = None
    ) -> list[Forecast]:
        """Every setting, best first, as it would do on the model's own greedy continuations of held-out text.

        A model's own text is what its exits will have to follow, and it is unlike other text: a small model
        repeats itself, which its first layers may or may not be able to copy. Empty if there are no costs. With a
        draft vocabulary, (n,) token ids, the whole head and the one that is cut to them are both tried.
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
            measured = measure_exits(model, rows, self.exits, draft_vocabulary=draft_vocabulary)
        return best_setting(measured, self.costs)


def _continued(prompt: torch.Tensor, text: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """A prompt and its continuation as one row, (1, length) each, of which the continuation counts."""
    ids = torch.cat([prompt, text]).to(device)[None]
    labels = ids.clone()
    labels[:, : len(prompt)] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


def report(evaluation: Evaluation, split: str, step: int, reporter: Reporter, tracker: Tracker) -> None:
    """Show an evaluation as a table and log it."""
    record = evaluation.record()
    rows = []
    for exit_layer, numbers in record["exits"].items():
        shares = [f"{numbers[name]:.3f}" for name in ("loss", "agreement", "overlap")]
        forecasts = [_cell(numbers.get("forecast", {}).get(way)) for way in ("greedy", "sampled")]
        rows.append([exit_layer, *shares, *forecasts])
    title = (
        f"held-out {split} text after {step} steps: loss of the last layer {evaluation.last_loss:.3f}\n"
        "forecasts: best number of drafts, tokens a verify step, speed over plain decoding"
    )
    reporter.table(title, ["exit", "loss", "agreement", "overlap", "greedy forecast", "sampled forecast"], rows)
    tracker.log(step, split, record)


def _cell(forecast: dict[str, Any] | None) -> str:
    if forecast is None:
        return "-"
    length, speedup = forecast["mean_acceptance_length"], forecast["speedup"]
    return f"{forecast['num_draft_tokens']}, {length:.2f}, {speedup:.2f}x"
