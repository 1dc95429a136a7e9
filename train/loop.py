"""The training loop, from top to bottom.

Everything random in step `s` is seeded from (run.seed, s, rank), and the rows it reads follow from (run.seed,
s): a run that is stopped and resumed does bit for bit what it would have done.
"""

import math
import signal
import time
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from layerskip.training.objective import IGNORE_INDEX
from train.best import best_so_far, is_best_now
from train.blocks import Batch, Mixture
from train.checkpoint import half_written, latest_checkpoint, save_checkpoint
from train.config import TrainConfig
from train.console import Reporter
from train.engine import autocast, fill_gradients, leave
from train.errors import TrainingError
from train.evaluate import report
from train.finish import finish, is_finished, record_before
from train.hub import Uploads
from train.interrupts import Interrupts
from train.meter import Meter
from train.optim import learning_rate, set_learning_rate
from train.order import micro_batches
from train.own_text import open_own_text, reads_own_text
from train.samples import write_samples
from train.setup import Run, set_up
from train.tracking import Tracker


def train(config: TrainConfig, argv: Sequence[str] = ()) -> int:
    """Run, or resume, the training that `config` describes; `argv` is noted in provenance.json.

    Returns the exit code: 0 when the run is finished, 128 + signal when it was stopped and can be resumed.
    Raises `ConfigError` for settings that do not fit each other or the model, `TrainingError` for a folder,
    text or model that cannot be used and for a loss that is not finite.
    """
    run = set_up(config, argv)
    config = run.config  # as decided for this machine
    accelerator, model, optimizer, progress = run.accelerator, run.model, run.optimizer, run.progress
    optim, every, folder = config.optim, config.every, config.run.folder
    main, rank, processes = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    tokens_per_step = optim.global_batch_size * config.data.sequence_length
    meter = Meter(run.handle.num_layers, accelerator.device)
    own_text: Mixture | None = None  # once it is written

    with (
        Interrupts() as interrupts,
        Reporter(main, optim.max_steps, progress.step) as reporter,
        Tracker(config, progress.step, main) as tracker,
        Uploads(config, reporter, main) as uploads,
    ):
        announce(run, reporter)
        for note in tracker.notes:
            reporter.say(note)
        if is_finished(run):
            reporter.say(f"{folder} is finished already; raise optim.max_steps to go on")
            return 0
        if progress.step == 0:
            record_before(run, reporter, tracker)

        reporter.begin()
        while progress.step < optim.max_steps:
            started = time.perf_counter()
            step = progress.step
            seed_step(config.run.seed, step, rank)
            rate = learning_rate(step, optim)
            set_learning_rate(optimizer.param_groups, rate)

            is_own = reads_own_text(config, step)
            if is_own and own_text is None:
                reporter.say(f"the model continues {config.data.own_text_rows} texts, for its exits to follow")
                own_text = open_own_text(run)
            text = own_text if is_own and own_text is not None else run.data.train
            # This process's rows of the whole accumulation window: batches of (micro_batch, sequence_length).
            window = [
                text.read(config.run.seed, positions)
                for positions in micro_batches(step, optim.global_batch_size, optim.micro_batch_size, rank, processes)
            ]
            # Losses are sums divided by the targets of the whole window over all processes, so that every
            # token weighs the same however the batch is cut up.
            num_items = count_targets(window, accelerator)
            # Undoes two means that are taken later: accelerate's over micro-steps and DDP's over processes.
            scale = len(window) * processes

            stop, gradient_norm = False, 0.0
            for micro_step, batch in enumerate(window):
                run.handle.set_step(step, micro_step, rank * optim.micro_batch_size, own_text=is_own)
                with accelerator.accumulate(model):
                    inputs = batch.inputs(accelerator.device)
                    with autocast(accelerator, config):
                        loss = model(**inputs, num_items_in_batch=num_items, use_cache=False).loss
                    meter.add(loss, run.handle.losses, run.handle.reference_loss)
                    if accelerator.sync_gradients:  # before backward: DeepSpeed steps inside it
                        stop = agree(run, meter.step_loss, interrupts)
                    accelerator.backward(loss * scale)
                    if accelerator.sync_gradients:
                        gradient_norm = clip_gradients(run)
                    optimizer.step()
                    optimizer.zero_grad()
            progress.step += 1
            progress.tokens += tokens_per_step
            meter.end_step(run.handle.active_exits, time.perf_counter() - started, run.handle.dropout_rates)
            reporter.advance(progress.step)

            last_step = progress.step == optim.max_steps
            if progress.step % every.log == 0 or last_step:
                metrics = meter.read(accelerator, tokens_per_step)
                metrics |= {"learning_rate": rate, "gradient_norm": gradient_norm, "tokens": progress.tokens}
                tracker.log(progress.step, "train", metrics)
                reporter.metrics(progress.step, metrics)
                uploads.poll()
            is_best = False
            if progress.step % every.evaluate == 0 and not last_step and not stop:
                evaluation = run.evaluator.measure(model, run.data.validation)
                report(evaluation, "validation", progress.step, reporter, tracker)
                write_samples(run, tracker)
                is_best = is_best_now(run, tracker)
            if progress.step % every.save == 0 or is_best or last_step or stop:
                best = best_so_far(config, tracker)
                saved = save_checkpoint(
                    *(accelerator, model, optimizer, run.data.tokenizer, progress, folder, every.keep),
                    keep_step=best["step"] if best else None,
                )
                reporter.say(f"saved {saved}" + (", the best so far" if is_best else ""))
                if is_best and main:
                    uploads.best(saved, tracker.validations[-1], progress.tokens)
            if stop and not last_step:
                reporter.say(f"stopped after step {progress.step}; the same command goes on from there")
                leave(accelerator)
                return 128 + (interrupts.signal or signal.SIGTERM)

        finish(run, reporter, tracker, uploads)
    leave(accelerator)
    uploads.wait()  # the first process alone, after the others were let go
    return 0


def announce(run: Run, reporter: Reporter) -> None:
    """Say what is about to be trained, on what, and from where."""
    config, accelerator = run.config, run.accelerator
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in accelerator.unwrap_model(run.model).parameters())
    blocks = {"train": run.data.train, "validation": run.data.validation, "test": run.data.test}
    tokens = ", ".join(f"{len(b) * config.data.sequence_length:,} {split}" for split, b in blocks.items())
    reporter.say(f"{config.run.name}: {parameters:,} parameters, {run.handle.num_layers} layers; tokens: {tokens}")
    for note in run.data.notes:
        reporter.say(note)
    kind = accelerator.distributed_type
    engine = "1 process" if kind == DistributedType.NO else f"{kind.value} over {accelerator.num_processes} processes"
    for folder in half_written(config.run.folder):
        reporter.say(f"ignored the half-written checkpoint {folder}")
    where = f"resumed from {run.resumed}" if run.resumed else "from the start"
    reporter.say(f"{engine} on {accelerator.device.type}, {config.model.dtype}; {where}; in {config.run.folder}")


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
