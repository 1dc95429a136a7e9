"""For transformers' Trainer (and TRL's): tells the recipe at which step training is, and brings adapters back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from layerskip.model.adapters import ADAPTERS_FILE

if TYPE_CHECKING:
    from layerskip.training.handle import Handle


class RecipeCallback(TrainerCallback):
    """Keeps a recipe's step at the trainer's, through gradient accumulation and resuming.

    Without it each forward counts as a step from 0, so that dropout schedules and curricula would run too fast
    under accumulation and begin anew after a resume.

    Exit adapters go into every checkpoint by themselves; a resume, and `load_best_model_at_end`, read them back here.

        trainer = Trainer(model, args, train_dataset=..., callbacks=[RecipeCallback(handle)])

    Raises:
        FileNotFoundError: where training begins, if a resumed checkpoint is not in the trainer's folder, or has none.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._micro_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            self._load(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load(Path(state.best_model_checkpoint))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_step = 0
        self._tell(args, state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_step += 1
        self._tell(args, state)

    def _tell(self, args: Any, state: Any) -> None:
        forward = self._micro_step * args.world_size + args.process_index
        self.handle.set_step(state.global_step, forward * args.per_device_train_batch_size)

    def _load(self, checkpoint: Path) -> None:
        """Adapters as a checkpoint has them; engines that shard weights bring them back themselves."""
        adapters = self.handle.adapters
        if adapters is None or any(hasattr(w, "placements") or hasattr(w, "ds_id") for w in adapters.parameters()):
            return
        if not (checkpoint / ADAPTERS_FILE).is_file():
            raise FileNotFoundError(
                f"there is no {ADAPTERS_FILE} in {checkpoint}, and the exits would begin anew: copy it there from the "
                "checkpoint that training goes on from"
            )
        adapters.load_state_dict(load_file(checkpoint / ADAPTERS_FILE))
