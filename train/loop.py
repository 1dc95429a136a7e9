"""The training loop, from top to bottom: what a step is stands in `step.py`."""

import signal
import time
from collections.abc import Sequence

from accelerate.utils import DistributedType

from train.best import best_so_far, is_best_now
from train.blocks import Mixture
from train.checkpoint import half_written, save_checkpoint
from train.config import TrainConfig
from train.console import Reporter
from train.engine import leave
from train.evaluate import report
from train.finish import finish, is_finished, record_before
from train.hub import Uploads
from train.interrupts import Interrupts
from train.meter import Meter
from train.own_text import open_own_text, reads_own_text
from train.samples import write_samples
from train.setup import Run, set_up
from train.step import Step, take_step
from train.tracking import Tracker


def train(config: TrainConfig, argv: Sequence[str] = ()) -> int:
    """Run, or resume, the training that `config` describes; `argv` is noted in provenance.json.

    Returns the exit code: 0 when the run is finished, 128 + signal when it was stopped and can be resumed.
    Raises `ConfigError` for settings that do not fit each other or the model, `TrainingError` for a folder,
    text or model that cannot be used and for a loss that is not finite.
    """
    run = set_up(config, argv)
    config = run.config  # as decided for this machine
    main = run.accelerator.is_main_process
    with (
        Interrupts() as interrupts,
        Reporter(main, config.optim.max_steps, run.progress.step) as reporter,
        Tracker(config, run.progress.step, main) as tracker,
        Uploads(config, reporter, main) as uploads,
    ):
        announce(run, reporter)
        for note in tracker.notes:
            reporter.say(note)
        if is_finished(run):
            reporter.say(f"{config.run.folder} is finished already; raise optim.max_steps to go on")
            return 0
        if run.progress.step == 0:
            record_before(run, reporter, tracker)
        if not take_all_steps(run, interrupts, reporter, tracker, uploads):
            reporter.say(f"stopped after step {run.progress.step}; the same command goes on from there")
            leave(run.accelerator)
            return 128 + (interrupts.signal or signal.SIGTERM)
        finish(run, reporter, tracker, uploads)
    leave(run.accelerator)
    uploads.wait()  # the first process alone, after the others were let go
    return 0


def take_all_steps(run: Run, interrupts: Interrupts, reporter: Reporter, tracker: Tracker, uploads: Uploads) -> bool:
    """Take steps until the last, with what is due after each; False if one was told to stop, once that is saved."""
    config, progress, every = run.config, run.progress, run.config.every
    meter = Meter(run.handle.num_layers, run.accelerator.device)
    own_text: Mixture | None = None  # once it is written
    reporter.begin()
    while progress.step < config.optim.max_steps:
        started = time.perf_counter()
        is_own = reads_own_text(config, progress.step)
        if is_own and own_text is None:
            own_text = open_own_text(run, reporter.say)
        text = own_text if is_own and own_text is not None else run.data.train
        step = take_step(run, text, is_own, meter, interrupts)
        progress.step += 1
        progress.tokens += tokens_per_step(config)
        meter.end_step(run.handle.active_exits, time.perf_counter() - started, run.handle.dropout_rates)
        reporter.advance(progress.step)

        last_step = progress.step == config.optim.max_steps
        if progress.step % every.log == 0 or last_step:
            log(run, step, meter, reporter, tracker)
            uploads.poll()
        is_best = False
        if progress.step % every.evaluate == 0 and not last_step and not step.stop:
            is_best = evaluate(run, reporter, tracker)
        if progress.step % every.save == 0 or is_best or last_step or step.stop:
            save(run, is_best, reporter, tracker, uploads)
        if step.stop and not last_step:
            return False
    return True


def tokens_per_step(config: TrainConfig) -> int:
    """Tokens that an optimizer step reads, over all processes."""
    return config.optim.global_batch_size * config.data.sequence_length


def log(run: Run, step: Step, meter: Meter, reporter: Reporter, tracker: Tracker) -> None:
    """Show and record the means since the last time; every process calls this."""
    metrics = meter.read(run.accelerator, tokens_per_step(run.config))
    metrics |= {"learning_rate": step.learning_rate, "gradient_norm": step.gradient_norm, "tokens": run.progress.tokens}
    tracker.log(run.progress.step, "train", metrics)
    reporter.metrics(run.progress.step, metrics)


def evaluate(run: Run, reporter: Reporter, tracker: Tracker) -> bool:
    """Measure the exits on validation text; returns whether this is the best step so far."""
    evaluation = run.evaluator.measure(run.model, run.data.validation)
    report(evaluation, "validation", run.progress.step, reporter, tracker)
    write_samples(run, tracker)
    return is_best_now(run, tracker)


def save(run: Run, is_best: bool, reporter: Reporter, tracker: Tracker, uploads: Uploads) -> None:
    """Save a checkpoint, and upload it if it is the best so far and asked for."""
    best = best_so_far(run.config, tracker)
    saved = save_checkpoint(
        *(run.accelerator, run.model, run.optimizer, run.data.tokenizer, run.progress),
        *(run.config.run.folder, run.config.every.keep),
        keep_step=best["step"] if best else None,
    )
    reporter.say(f"saved {saved}" + (", the best so far" if is_best else ""))
    if is_best and run.accelerator.is_main_process:
        uploads.best(saved, tracker.validations[-1], run.progress.tokens)


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
