"""The best checkpoint: the fastest forecast among those whose last layer is as good as it has to be.

A pure function of the validation records in metrics.jsonl, so that a resumed run needs no state to go on with it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip.model.adapters import adapters_of
from train.checkpoint import whole_checkpoint
from train.config import TrainConfig
from train.console import Reporter
from train.engine import is_sharded
from train.lora import load_lora
from train.model import build_model
from train.setup import Run
from train.tracking import Tracker


def best_record(records: Sequence[dict[str, Any]], margin: float, from_scratch: bool) -> dict[str, Any] | None:
    """The validation record with the highest forecast speed-up, of those whose last layer may be exported.

    The last layer's loss may be above the reference by a share `margin`. The reference is the loss before training,
    or from scratch, where that says nothing, the lowest of all: so an early checkpoint, whose exits agree with a
    last layer that knows little yet, is forgotten as soon as a better last layer is seen.

    Args:
        records: in the order they were measured; of two at one step the later one counts.

    Returns:
        None if there is no record after step 0, none within the margin, or none with a forecast.
    """
    by_step = {record["step"]: record for record in records}
    losses = [record["last"]["loss"] for record in by_step.values()]
    if not from_scratch and 0 in by_step:
        losses = [by_step[0]["last"]["loss"]]
    known = [record for step, record in by_step.items() if step > 0 and forecast_speedup(record) is not None]
    allowed = [record for record in known if record["last"]["loss"] <= min(losses) * (1 + margin)]
    return max(allowed, key=lambda record: forecast_speedup(record) or 0.0, default=None)


def forecast_speedup(record: dict[str, Any]) -> float | None:
    """The fastest greedy forecast among a record's exits; None without forecasts."""
    forecasts = [numbers.get("forecast") for numbers in record.get("exits", {}).values()]
    return max((forecast["greedy"]["speedup"] for forecast in forecasts if forecast), default=None)


def best_so_far(config: TrainConfig, tracker: Tracker) -> dict[str, Any] | None:
    """The best record of this run until now, if the best is kept; on the first process, None on the others."""
    if not config.best.keep:
        return None
    return best_record(tracker.validations, config.best.margin, config.model.name_or_path is None)


def is_best_now(run: Run, tracker: Tracker) -> bool:
    """Whether the evaluation of this very step is the best so far; every process calls this and gets one answer."""
    best = best_so_far(run.config, tracker)
    mine = float(best is not None and best["step"] == run.progress.step)
    return bool(run.accelerator.reduce(torch.tensor(mine, device=run.accelerator.device), reduction="sum") > 0)


def export_rule(config: TrainConfig) -> str:
    """Which checkpoint a finished run exports."""
    return "best" if config.best.export else "last"


def choose_export(run: Run, reporter: Reporter, tracker: Tracker) -> int:
    """The step whose weights are exported, after the evaluation of the last one; every process calls this.

    If `best.export` says so and the best checkpoint is an earlier one, its weights are put into the model.
    """
    best = best_so_far(run.config, tracker)
    if run.accelerator.is_main_process and run.config.best.keep and not is_sharded(run.accelerator):
        reporter.say(_describe(run, best, forecast_speedup(tracker.validations[-1])))
    step = best["step"] if best else run.progress.step
    mine = torch.tensor(step if run.accelerator.is_main_process else 0, device=run.accelerator.device)
    step = int(run.accelerator.reduce(mine, reduction="sum"))  # the first process's
    if step == run.progress.step or not run.config.best.export:
        return run.progress.step
    checkpoint = whole_checkpoint(run.config.run.folder, step)
    if checkpoint is None:
        reporter.say(f"the best checkpoint, of step {step}, is gone or not whole: the last is exported")
        return run.progress.step
    _load_weights(run, checkpoint)
    return step


def _describe(run: Run, best: dict[str, Any] | None, last: float | None) -> str:
    """One line on which checkpoint is the best, and on which is exported."""
    bound = "the start's" if run.config.model.name_or_path else "the lowest seen"
    margin = f"at most {run.config.best.margin:.1%} above {bound}"
    if best is None:
        return f"no checkpoint has its last layer's loss {margin} (best.margin): the last one is exported"
    found = (
        f"best checkpoint: step {best['step']}, forecast {forecast_speedup(best):.2f}x on held-out validation text, "
        f"loss of the last layer {best['last']['loss']:.3f}, {margin}"
    )
    if best["step"] == run.progress.step or run.config.best.export:
        return f"{found}; it is exported"
    return (
        f"{found}; the last one ({last or 0:.2f}x) is exported. For the best: best.export=true, the same command again"
    )


def _load_weights(run: Run, checkpoint: Path) -> None:
    """Give the model the weights of a checkpoint; not for sharded engines, which have no best one."""
    model = run.accelerator.unwrap_model(run.model)
    if run.config.model.lora_rank:
        load_lora(model, checkpoint)
        return
    loaded = build_model(run.config, model.config, checkpoint)
    model.load_state_dict(loaded.state_dict(), strict=False)  # the adapters come below
    if (adapters := adapters_of(model)) is not None and (earlier := adapters_of(loaded)) is not None:
        adapters.load_state_dict(earlier.state_dict())
