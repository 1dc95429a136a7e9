"""For transformers' Trainer (and TRL's): tells the recipe at which step training is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from layerskip.training.handle import Handle


class RecipeCallback(TrainerCallback):
    """Keeps a recipe's step at the trainer's, through gradient accumulation and resuming.

    Without it each forward counts as a step from 0, so that dropout schedules and curricula would run too fast
    under accumulation and begin anew after a resume.

        trainer = Trainer(model, args, train_dataset=..., callbacks=[RecipeCallback(handle)])
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._micro_step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_step = 0
        self._tell(args, state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_step += 1
        self._tell(args, state)

    def _tell(self, args: Any, state: Any) -> None:
        first_row = args.process_index * args.per_device_train_batch_size
        self.handle.set_step(state.global_step, self._micro_step, first_row)
