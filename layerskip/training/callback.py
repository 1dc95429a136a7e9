"""For transformers' Trainer (and TRL's): tells the recipe at which step training is, and keeps adapters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from layerskip.model.adapters import ADAPTERS_FILE, save_adapters

if TYPE_CHECKING:
    from layerskip.training.handle import Handle


class RecipeCallback(TrainerCallback):
    """Keeps a recipe's step at the trainer's, through gradient accumulation and resuming.

    Exit adapters, which `save_pretrained` leaves out, are written into the trainer's checkpoints (those of a model that
    is sharded are not, which is told in a warning) and read back at a resume from one of them.

    Without it each forward counts as a step from 0, so that dropout schedules and curricula would run too fast
    under accumulation and begin anew after a resume.

        trainer = Trainer(model, args, train_dataset=..., callbacks=[RecipeCallback(handle)])
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._micro_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._sharded:
            warnings.warn(
                "this Trainer shards the model, so its checkpoints leave the exit adapters out: save them yourself at "
                "the end, or use `accelerate launch train`, which gathers them",
                stacklevel=2,
            )
            return
        path = _checkpoint(args, state) / ADAPTERS_FILE
        if self.handle.adapters is not None and state.global_step > 0 and path.exists():
            self.handle.adapters.load_state_dict(load_file(path))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if self._weights and not self._sharded and state.is_world_process_zero and folder.is_dir():
            save_adapters(self.handle.model, folder)

    @property
    def _weights(self) -> list[nn.Parameter]:
        """The adapters'."""
        return [] if self.handle.adapters is None else list(self.handle.adapters.parameters())

    @property
    def _sharded(self) -> bool:
        return any(hasattr(weight, "placements") or hasattr(weight, "ds_id") for weight in self._weights)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_step = 0
        self._tell(args, state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_step += 1
        self._tell(args, state)

    def _tell(self, args: Any, state: Any) -> None:
        forward = self._micro_step * args.world_size + args.process_index
        self.handle.set_step(state.global_step, forward * args.per_device_train_batch_size)


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder that a trainer writes at the step it has come to."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
