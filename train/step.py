"""One optimizer step: the rows it reads, their loss over all processes, the update.

Everything random in step `s` is seeded from (run.seed, s, rank), and the rows it reads follow from (run.seed,
s): a run that is stopped and resumed does bit for bit what it would have done.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from layerskip.training.objective import IGNORE_INDEX
from train.blocks import Batch, Mixture
from train.checkpoint import latest_checkpoint
from train.engine import autocast, fill_gradients
from train.errors import TrainingError
from train.interrupts import Interrupts
from train.meter import Meter
from train.optim import learning_rate, set_learning_rate
from train.order import micro_batches
from train.setup import Run


class Step(NamedTuple):
    """What a step leaves to be known."""

    learning_rate: float
    gradient_norm: float  # before it was clipped
    stop: bool  # whether any process was told to stop after it


def take_step(run: Run, text: Mixture, is_own: bool, meter: Meter, interrupts: Interrupts) -> Step:
    """Take step `run.progress.step`, on rows of `text`, which the model wrote itself where `is_own`.

    `run.progress` stays as it is. Raises `TrainingError` on all processes, before anything is updated, if the loss or
    the gradient is not finite.
    """
    optim, step, model, accelerator = run.config.optim, run.progress.step, run.model, run.accelerator
    rank, processes = accelerator.process_index, accelerator.num_processes
    seed_step(run.config.run.seed, step, rank)
    rate = learning_rate(step, optim)
    set_learning_rate(run.optimizer.param_groups, rate)
    # This process's rows of the whole accumulation window: batches of (micro_batch, sequence_length).
    rows = micro_batches(step, optim.global_batch_size, optim.micro_batch_size, rank, processes)
    window = [text.read(run.config.run.seed, positions) for positions in rows]
    # Losses are sums divided by the targets of the whole window over all processes, so that every token weighs the
    # same however the batch is cut up.
    num_items = count_targets(window, accelerator)
    # Undoes two means that are taken later: accelerate's over micro-steps and DDP's over processes.
    scale = len(window) * processes

    stop, gradient_norm = False, 0.0
    for positions, batch in zip(rows, window, strict=True):
        run.handle.set_step(step, positions.start - step * optim.global_batch_size, own_text=is_own)
        with accelerator.accumulate(model):
            with autocast(accelerator, run.config):
                loss = model(**batch.inputs(accelerator.device), num_items_in_batch=num_items, use_cache=False).loss
            meter.add(loss, run.handle.losses, run.handle.reference_loss)
            if accelerator.sync_gradients:  # before backward: DeepSpeed steps inside it
                stop = agree(run, meter.step_loss, interrupts)
            accelerator.backward(loss * scale)
            if accelerator.sync_gradients:
                gradient_norm = clip_gradients(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
    return Step(rate, gradient_norm, stop)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for one step (a model's own dropout draws from it): a resume needs no random state."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def count_targets(window: Sequence[Batch], accelerator: Accelerator) -> int:
    """Predicted tokens of a window over all processes, at least 1: without any the loss is 0, and is not divided
    by 0, and the step is taken as on every other process."""
    count = sum(int((batch.labels[:, 1:] != IGNORE_INDEX).sum()) for batch in window)
    return max(1, int(accelerator.reduce(torch.tensor(count, device=accelerator.device), reduction="sum")))


def agree(run: Run, step_loss: Tensor, interrupts: Interrupts) -> bool:
    """Whether any process was told to stop after this step.

    Raises `TrainingError` on all of them, before anything is updated, if the step's loss is not finite on
    one.
    """
    asked = float(interrupts.poll() != 0)
    votes = torch.stack([step_loss.float(), torch.full_like(step_loss, asked, dtype=torch.float)])
    loss, stops = run.accelerator.reduce(votes, reduction="sum").tolist()
    if not math.isfinite(loss):
        raise not_finite(run, "loss", loss)
    return bool(stops > 0)


def clip_gradients(run: Run) -> float:
    """Scale gradients down to `optim.max_grad_norm`; returns their norm. `TrainingError` if not finite."""
    deepspeed = run.accelerator.distributed_type == DistributedType.DEEPSPEED
    if not deepspeed:
        fill_gradients(run.model.parameters())
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), run.config.optim.max_grad_norm)
    if deepspeed:  # has clipped and stepped already
        return float(norm or 0.0)
    assert norm is not None
    norm = float(norm)
    if not math.isfinite(norm):
        raise not_finite(run, "gradient norm", norm)
    return norm


def not_finite(run: Run, what: str, value: float) -> TrainingError:
    """The error for a step that must not be taken."""
    kept = latest_checkpoint(run.config.run.folder)
    way_out = (
        f"the last checkpoint is {kept}: start a new run from it (model.name_or_path)" if kept else "start a new run"
    )
    rate = run.config.optim.learning_rate
    return TrainingError(
        f"the {what} is {value} in step {run.progress.step + 1}; the step was not taken; {way_out} with a "
        f"lower optim.learning_rate (now {rate:g}) or a longer optim.warmup_steps"
    )
