"""The accelerate engine (one process, DDP, DeepSpeed, FSDP), and a guard that it is the launched one."""

import contextlib
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, GradientAccumulationPlugin

from train.config import TrainConfig
from train.errors import ConfigError, TrainingError

SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP)
# The first process prepares the data while the others wait: longer than the usual 10 minutes for a large
# corpus.
_PATIENCE = timedelta(hours=6)


def accumulation_steps(config: TrainConfig, num_processes: int) -> int:
    """Micro-steps per optimizer step. Raises `ConfigError` if the global batch does not divide evenly."""
    optim = config.optim
    rows = optim.micro_batch_size * num_processes
    if optim.global_batch_size % rows:
        raise ConfigError(
            f"optim.global_batch_size is {optim.global_batch_size}; it must be a multiple of "
            f"optim.micro_batch_size ({optim.micro_batch_size}) times {num_processes} processes"
        )
    return optim.global_batch_size // rows


def build_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator for this process, as `accelerate launch` or torchrun set it up.

    Raises `ConfigError` for a batch that does not divide over the processes, `TrainingError` if accelerate
    fell back to another engine than the launched one (which it does without a word).
    """
    steps = accumulation_steps(config, int(os.environ.get("WORLD_SIZE", 1)))
    deepspeed = _asked_for("DEEPSPEED")
    no_device = not torch.accelerator.is_available()
    _set_threads(config.run.cpu_threads, no_device)
    group = InitProcessGroupKwargs(timeout=_PATIENCE)
    if deepspeed and no_device:
        # accelerate finds no backend for DeepSpeed without a GPU, and cpu=True would turn DeepSpeed off.
        group.backend = "gloo"
    # Sharded engines cast by themselves. Otherwise `autocast` does it: accelerate's own wrapper would also
    # copy the logits to float32, which nobody reads.
    precision = "bf16" if config.model.dtype == "bfloat16" and (deepspeed or _asked_for("FSDP")) else "no"
    accelerator = Accelerator(
        cpu=no_device and not deepspeed,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False),
        kwargs_handlers=[group, DistributedDataParallelKwargs(find_unused_parameters=_leaves_layers_out(config))],
    )
    _check_engine(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = config.optim.micro_batch_size
        settings["gradient_accumulation_steps"] = steps
        settings["gradient_clipping"] = config.optim.max_grad_norm
    return accelerator


def _leaves_layers_out(config: TrainConfig) -> bool:
    """Whether the loss of some step does not depend on the layers above its deepest exit: DDP would wait for them."""
    return not config.recipe.include_last or config.data.own_text > 0


def fill_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give trainable parameters that the step's loss does not depend on a gradient of zeros, before an update.

    DeepSpeed updates them with zeros whatever we do (momentum and weight decay go on), so the other engines have to,
    or the run would depend on the engine.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _set_threads(wanted: int | None, no_device: bool) -> None:
    """`accelerate launch` gives every process one thread, which on a CPU leaves the other cores idle."""
    if wanted is None and no_device:
        # The cores this process may use, where the system can tell (not on macOS).
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if wanted is not None:
        torch.set_num_threads(wanted)


def _asked_for(engine: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def _check_engine(accelerator: Accelerator) -> None:
    """Raise `TrainingError` unless `accelerator` runs the engine and the processes that were launched."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched:
        raise TrainingError(
            f"{launched} processes were launched, but accelerate runs {accelerator.num_processes} here, each "
            "training alone; launch with --config_file configs/accelerate/cpu-2.yaml (no GPU) or ddp.yaml"
        )
    for engine in SHARDED:
        if _asked_for(engine.value) and accelerator.distributed_type != engine:
            raise TrainingError(
                f"{engine.value} was asked for, but accelerate runs {accelerator.distributed_type.value}: "
                "FSDP needs GPUs; or launch with configs/accelerate/ddp.yaml (or cpu-2.yaml)"
            )


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether no process holds the whole model (DeepSpeed, FSDP): all must take part in every forward."""
    return accelerator.distributed_type in SHARDED


def autocast(accelerator: Accelerator, config: TrainConfig) -> AbstractContextManager[object]:
    """The context of a forward pass in `model.dtype`; none for sharded engines, which cast themselves."""
    if is_sharded(accelerator) or config.model.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16)


def leave(accelerator: Accelerator) -> None:
    """End the run's trackers and process group."""
    if accelerator.num_processes > 1:
        # gloo's thread frees what its last barrier held, for which it needs the interpreter. Destroyed before that,
        # the group waits for its thread and the thread for the interpreter, for ever (seen with torch 2.13).
        time.sleep(0.5)
    accelerator.end_training()
