"""One process of a distributed test: `python -m tests.engine_worker FOLDER ENGINE ...`.

Trains VARIANTS of a tiny model under each engine, one after the other, on the same batches and as `train/step.py`
does. What came of it is in FOLDER/ENGINE: VARIANT.pt (by the first process), VARIANT.rows-RANK.pt, and the finished
checkpoint VARIANT/. RANK, WORLD_SIZE and MASTER_PORT are in the environment, as torchrun puts them there; without
them this is the run that the others must equal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import layerskip
from layerskip.forecast import measure_exits
from layerskip.training import objective
from tests import tiny
from train.checkpoint import save_model
from train.command import load_config
from train.engine import build_accelerator, fill_gradients
from train.optim import build_optimizer

ENGINES = ("plain", "ddp", "zero1", "zero2", "zero3", "fsdp2")
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.yaml"
NUM_LAYERS, GLOBAL_BATCH, LENGTH, STEPS = 5, 8, 12, 10
CHUNKS = objective.MIN_CHUNK, objective.CHUNK_BYTES


@dataclass(frozen=True)
class Variant:
    """What is trained: the recipe, and into how many micro-steps the global batch is cut."""

    recipe: layerskip.Recipe
    micro_steps: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False  # gradient checkpointing, of the layers and of the exits' head
    own_text: tuple[int, ...] = ()  # steps in which the last layer is left out of the loss


PAPER = partial(layerskip.Recipe.preset, "paper-continual")
VARIANTS = {
    # The paper's: every layer dropped at its own rate, all exits in the loss, the head called five times a forward.
    "dropout": Variant(PAPER(max_dropout=0.6, curriculum="all")),
    # Four micro-steps of one row a process: whole micro-batches are dropped, on one process and not the other.
    "accumulated": Variant(
        PAPER(max_dropout=0.6, curriculum="all", self_distillation=0.5, dropout_depth="linear"),
        micro_steps=4,
        model={"tie_word_embeddings": True},
        recompute=True,
    ),
    # Another set of exits in every step, and steps in which the layers above the exit get no gradient.
    "rotating": Variant(
        PAPER(max_dropout=0.3, curriculum="rotational", curriculum_stride=3),
        micro_steps=2,
        own_text=(4, 6, 7),
    ),
    # A frozen target: only an adapter at each exit trains, one of them in each step.
    "adapters": Variant(
        layerskip.Recipe(
            max_dropout=0, adapter_rank=4, freeze_model=True, exits=(1, 3), curriculum="rotational", curriculum_stride=2
        ),
        micro_steps=2,
    ),
    # The same with blocks, which are given what the layers after an exit are given; in steps on the model's own text
    # those layers are not run.
    "blocks": Variant(
        layerskip.Recipe(
            max_dropout=0,
            adapter_blocks=2,
            freeze_model=True,
            exits=(1, 3),
            curriculum="rotational",
            curriculum_stride=2,
        ),
        micro_steps=2,
        recompute=True,
        own_text=(3, 4, 8),
    ),
}


def batches(step: int) -> Tensor:
    """The (GLOBAL_BATCH, LENGTH) token ids of a step."""
    return torch.randint(3, 64, (GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


class Launched:
    """The engine that accelerate runs: one process, DDP or DeepSpeed, as `train/engine.py` builds it."""

    def __init__(self, model: nn.Module, variant: Variant) -> None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        micro_batch = GLOBAL_BATCH // variant.micro_steps // processes
        sizes = [f"optim.global_batch_size={GLOBAL_BATCH}", f"optim.micro_batch_size={micro_batch}"]
        config = load_config(CONFIG, [*sizes, "optim.max_grad_norm=2.0", "data.own_text=0.5"])
        self.accelerator = build_accelerator(config)
        self.config, self.optim = config, config.optim
        deepspeed = self.accelerator.state.deepspeed_plugin
        if deepspeed is not None:
            # Parameters below this size are never shared out: all of a tiny model's.
            deepspeed.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, config.optim))
        self.deepspeed = self.model if deepspeed is not None else None
        self.rank, self.processes = self.accelerator.process_index, self.accelerator.num_processes
        self.name = self.accelerator.distributed_type.value

    def step(self, losses: list[Callable[[], Tensor]], before_update: Callable[[], None]) -> float:
        """Backward through every micro-step's loss, then update; returns their sum over the processes."""
        total, scale = 0.0, len(losses) * self.processes
        if self.deepspeed is not None:  # it steps inside the last backward
            update = self.deepspeed.step
            self.deepspeed.step = lambda: (before_update(), update())
        for loss_of in losses:
            with self.accelerator.accumulate(self.model):
                loss = loss_of()
                total += loss.item()
                self.accelerator.backward(loss * scale)
                if self.accelerator.sync_gradients:
                    if self.deepspeed is None:
                        fill_gradients(self.model.parameters())
                        before_update()
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        if self.deepspeed is not None:
            self.deepspeed.step = update
        return float(self.accelerator.reduce(torch.tensor(total, dtype=torch.float64), reduction="sum"))

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The whole gradient of a parameter, over all processes and micro-steps."""
        if self.deepspeed is not None:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(parameter)
        assert parameter.grad is not None
        return parameter.grad

    def save(self, tokenizer: Any, folder: Path) -> None:
        save_model(self.accelerator, self.model, tokenizer, folder)


class FullyShard:
    """PyTorch's FSDP2 as accelerate applies it: every layer, then the rest, sharded anew after each forward."""

    name = "FSDP2"

    def __init__(self, model: nn.Module, variant: Variant) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        config = load_config(CONFIG, ["optim.max_grad_norm=2.0"])
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self.model = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        self.config, self.optimizer = config, build_optimizer(model, config.optim)
        self.rank, self.processes = mesh.get_rank(), mesh.size()

    def step(self, losses: list[Callable[[], Tensor]], before_update: Callable[[], None]) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for loss_of in losses:
            loss = loss_of()
            total += loss.detach().double()
            (loss * self.processes).backward()
        fill_gradients(self.model.parameters())
        before_update()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self._sum(total))

    def _sum(self, value: Tensor, reduction: str = "sum") -> Tensor:
        torch.distributed.all_reduce(value)
        return value

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        assert isinstance(parameter.grad, DTensor)
        return parameter.grad.full_tensor()

    def save(self, tokenizer: Any, folder: Path) -> None:
        gather = partial(Accelerator.get_state_dict, SimpleNamespace(distributed_type=None, is_fsdp2=True))
        accelerator = SimpleNamespace(
            get_state_dict=gather,
            unwrap_model=lambda model: model,
            is_main_process=self.rank == 0,
            device=torch.device("cpu"),
            reduce=self._sum,
        )
        save_model(accelerator, self.model, tokenizer, folder)


def train(engine_name: str, variant_name: str, folder: Path) -> None:
    """Train one variant under one engine and write what came of it."""
    variant = VARIANTS[variant_name]
    model = tiny.llama(num_layers=NUM_LAYERS, **variant.model).train()
    objective.MIN_CHUNK, objective.CHUNK_BYTES = (16, 1) if variant.recompute else CHUNKS
    if variant.recompute:
        model.gradient_checkpointing_enable()
    handle = layerskip.prepare(model, variant.recipe)
    dropped = watch_dropped_rows(model)
    engine = (FullyShard if engine_name == "fsdp2" else Launched)(model, variant)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    micro_batch = GLOBAL_BATCH // variant.micro_steps // engine.processes
    num_items = GLOBAL_BATCH * (LENGTH - 1)
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        for name, parameter in parameters.items():
            gradients[name] = engine.gradient(parameter).detach().clone()

    def loss_of(step: int, micro_step: int) -> Tensor:
        first_row = engine.rank * micro_batch  # within the micro-step, over all processes
        start = micro_step * micro_batch * engine.processes + first_row
        ids = batches(step)[start : start + micro_batch]
        handle.set_step(step, start, own_text=step in variant.own_text)
        return engine.model(input_ids=ids, labels=ids, num_items_in_batch=num_items, use_cache=False).loss

    losses, exits = [], []
    for step in range(STEPS):
        forwards = [partial(loss_of, step, micro_step) for micro_step in range(variant.micro_steps)]
        losses.append(engine.step(forwards, keep_gradients if step == 0 else lambda: None))
        exits.append(handle.active_exits)
    torch.save(dropped, folder / f"{variant_name}.rows-{engine.rank}.pt")
    evaluation = measure_exits(engine.model, [batches(99)])
    measured = {exit_layer: numbers.loss for exit_layer, numbers in evaluation.items()}
    engine.save(tiny.tokenizer(), folder / variant_name)
    if engine.rank == 0:
        result = {"engine": engine.name, "losses": losses, "exits": exits, "gradients": gradients, "measured": measured}
        torch.save(result, folder / f"{variant_name}.pt")


def watch_dropped_rows(model: nn.Module) -> list[list[bool]]:
    """A list that grows by the (rows,) booleans of every layer call: which rows passed the layer by."""
    dropped: list[list[bool]] = []

    def before(layer: nn.Module, args: tuple, kwargs: dict) -> None:
        layer.hidden_before = args[0].detach() if args else kwargs["hidden_states"].detach()

    def after(layer: nn.Module, args: tuple, output: Any) -> None:
        if layer.training:
            hidden = output[0] if isinstance(output, tuple) else output
            dropped.append((hidden == layer.hidden_before).all(dim=(1, 2)).tolist())

    for layer in model.model.layers:
        layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        layer.register_forward_hook(after)
    return dropped


def main() -> None:
    """Train every variant under every engine that is named."""
    folder, engines = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    for engine in engines:
        if engine.startswith("zero"):
            os.environ |= {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": engine[-1],
                "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
            }
        if engine == "fsdp2" and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        (folder / engine).mkdir(exist_ok=True)
        for variant in VARIANTS:
            train(engine, variant, folder / engine)
            AcceleratorState._reset_state(reset_partial_state=True)  # the next one accumulates otherwise
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
