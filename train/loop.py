"""The training loop, from top to bottom.

Everything random in step `s` is seeded from (run.seed, s, rank), and the rows it reads follow from (run.seed, s): a run
that is stopped and resumed does bit for bit what it would have done.
"""

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from train.checkpoint import latest_checkpoint, save_checkpoint
from train.config import TrainConfig
from train.console import Reporter
from train.engine import autocast
from train.errors import TrainingError
from train.finish import finish, is_finished, record_before
from train.interrupts import Interrupts
from train.optim import learning_rate, set_learning_rate
from train.packing import block_index, micro_batches
from train.setup import Run, set_up
from train.tracking import Tracker


def train(config: TrainConfig, argv: Sequence[str] = ()) -> int:
    """Run, or resume, the training that `config` describes; `argv` is noted in provenance.json.

    Returns the exit code: 0 when the run is finished, 128 + signal when it was stopped and can be resumed.
    Raises `ConfigError` for settings that do not fit each other or the model, `TrainingError` for a folder, text or
    model that cannot be used and for a loss that is not finite.
    """
    run = set_up(config, argv)
    accelerator, model, optimizer, progress = run.accelerator, run.model, run.optimizer, run.progress
    optim, every = config.optim, config.every
    main, rank, processes = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    meter = Meter(run.handle.num_layers, accelerator.device)
    tokens_per_step = optim.global_batch_size * config.data.sequence_length

    with (
        Interrupts() as interrupts,
        Reporter(main, optim.max_steps, progress.step) as reporter,
        Tracker(config, progress.step, main) as tracker,
    ):
        announce(run, reporter)
        if is_finished(run):
            reporter.say(f"{config.run.folder} is finished already; raise optim.max_steps to go on")
            return 0
        if progress.step == 0:
            record_before(run, reporter, tracker)

        while progress.step < optim.max_steps:
            started = time.perf_counter()
            step = progress.step
            seed_step(config.run.seed, step, rank)
            rate = learning_rate(step, optim)
            set_learning_rate(optimizer.param_groups, rate)

            # The rows of this process for the whole accumulation window: [(micro_batch, sequence_length), ...]
            window = [
                run.data.train.rows(block_index(config.run.seed, i, len(run.data.train)) for i in positions)
                for positions in micro_batches(step, optim.global_batch_size, optim.micro_batch_size, rank, processes)
            ]
            # Losses are sums divided by the targets of the whole window over all processes, so that every token
            # weighs the same however the batch is cut up.
            num_items = count_targets(window, accelerator)
            # Undoes two means: accelerate's (DeepSpeed's) over micro-steps and DDP's over processes.
            scale = len(window) * processes

            stop, grad_norm = False, 0.0
            for micro_step, rows in enumerate(window):
                run.handle.set_step(step, micro_step, first_row=rank * optim.micro_batch_size)
                with accelerator.accumulate(model):
                    input_ids = rows.to(accelerator.device, non_blocking=True)
                    with autocast(accelerator, config):
                        loss = model(
                            input_ids=input_ids, labels=input_ids, num_items_in_batch=num_items, use_cache=False
                        ).loss
                    meter.add(loss, run.handle.losses)
                    if accelerator.sync_gradients:  # before backward: DeepSpeed steps inside it
                        stop = agree(accelerator, meter.step_loss, interrupts.poll() != 0, run)
                    accelerator.backward(loss * scale)
                    if accelerator.sync_gradients:
                        grad_norm = clip_gradients(run)
                    optimizer.step()
                    optimizer.zero_grad()
            meter.end_step(run.handle.active_exits, time.perf_counter() - started)
            progress.step += 1
            progress.tokens += tokens_per_step
            reporter.advance(progress.step)

            last_step = progress.step == optim.max_steps
            if progress.step % every.log == 0 or last_step:
                metrics = meter.read(accelerator)
                metrics |= {"learning_rate": rate, "grad_norm": grad_norm, "tokens": progress.tokens}
                metrics["tokens_per_second"] = tokens_per_step * meter.steps / meter.seconds
                tracker.log(progress.step, "train", metrics)
                reporter.metrics(progress.step, metrics)
                meter.reset()
            if progress.step % every.evaluate == 0 and not last_step:
                evaluation = run.evaluator.measure(run.data.validation)
                run.evaluator.report(evaluation, "validation", progress.step, reporter, tracker)
            if progress.step % every.save == 0 or last_step or stop:
                saved = save_checkpoint(
                    accelerator, model, optimizer, run.data.tokenizer, progress, config.run.folder, every.keep
                )
            if stop and not last_step:
                reporter.say(f"stopped after step {progress.step}, saved {saved}; the same command resumes from there")
                return 128 + (interrupts.signal or 15)

        finish(run, reporter, tracker)
    return 0
