"""The model's own text: continuations of training text, for its exits to learn to follow.

What an exit must predict when decoding is what the whole model says, and a model's own text is unlike any other:
it repeats itself, above all when greedy, and copies from further back than a few layers learn to from ordinary
text. So in the last steps of a run every other step reads text that the model wrote. On that text only the exits
learn, from the last layer's distribution: the model is not taught its own words. A frozen model, which has nothing to
learn from other text, reads nothing but its own in those steps, and its later layers are not run.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from layerskip.checkpoint.whole_files import replacing
from train.blocks import Blocks, Mixture
from train.config import TrainConfig
from train.continuations import Sampling, continue_prompts
from train.disk import writing
from train.engine import autocast, is_sharded
from train.packing import token_dtype
from train.setup import Run

_PROMPT_SHARE = 4  # the first 1/4 of a block is training text, the rest the model's


def reads_own_text(config: TrainConfig, step: int) -> bool:
    """Whether optimizer step `step` reads the model's own text: every other one of the last `data.own_text`, of a
    frozen model every one."""
    first = _first_step(config)
    return step >= first and (config.recipe.freeze_model or (step - first) % 2 == 0)


def _first_step(config: TrainConfig) -> int:
    return round(config.optim.max_steps * (1 - config.data.own_text))


def find_own_text(config: TrainConfig) -> Path | None:
    """The own text that the run has written, data/own-<the steps its model had taken>.bin; None if there is none."""
    return next((config.run.folder / "data").glob("own-*.bin"), None)


def open_own_text(run: Run, say: Callable[[str], None]) -> Mixture:
    """The model's own text, written from the model as it is now unless it is there already; says which.

    Every process calls this, at the same step; the first one writes, and a sharded model needs all to run it. A
    resumed run finds the text that was written before; a finished one with more steps to take is another model by
    then, and writes another. Raises `TrainingError` if it cannot be written.
    """
    step, found, is_main = run.progress.step, find_own_text(run.config), run.accelerator.is_main_process
    there = found is not None and _first_step(run.config) <= int(found.stem.removeprefix("own-")) <= step
    path = found if found and there else run.config.run.folder / "data" / f"own-{step:06d}.bin"
    rows = run.config.data.own_text_rows
    say(
        f"exits follow the {rows} texts in {path}" if there else f"the model continues {rows} texts for exits to follow"
    )
    run.accelerator.wait_for_everyone()  # until all have looked
    tokens = _continue_text(run) if not there and (is_main or is_sharded(run.accelerator)) else None
    with writing(run.accelerator, path):
        if tokens is not None and is_main:
            if found:
                found.unlink()  # first, so that there is one at most
            with replacing(path) as partial:
                partial.write_bytes(np.ascontiguousarray(tokens.numpy().astype(_dtype(run))).tobytes())
    return Mixture([Blocks(path, _dtype(run), run.config.data.sequence_length)], [1.0])


def _dtype(run: Run) -> np.dtype:  # type: ignore[type-arg]
    return token_dtype(len(run.data.tokenizer))


def _continue_text(run: Run) -> torch.Tensor:
    """Blocks from all over the training text that the model goes on with, every other one greedy, the rest sampled:
    (own_text_rows, sequence_length) ids, the greedy ones first. Rows have one length: a new document begins after an
    end."""
    data, seed = run.config.data, run.config.run.seed
    prompts = run.data.train.draw(seed, data.own_text_rows).input_ids[:, : data.sequence_length // _PROMPT_SHARE]
    model = run.accelerator.unwrap_model(run.model)
    greedy, sampled = prompts[::2], prompts[1::2]  # both of all sources
    seeds = np.random.SeedSequence([seed, len(prompts)]).generate_state(len(sampled)).tolist()
    padding = run.data.tokenizer.eos_token_id
    length = data.sequence_length - prompts.shape[1]
    with autocast(run.accelerator, run.config):
        rows = continue_prompts(model, list(greedy), length, padding)
        if len(sampled):
            rows += continue_prompts(model, list(sampled), length, padding, seeds=seeds, sampling=Sampling())
    return torch.cat([torch.cat([greedy, sampled]), torch.stack(rows)], dim=1)
