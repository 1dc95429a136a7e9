"""The model's own text: continuations of training text, for its exits to learn to follow.

What an exit must predict when decoding is what the whole model says, and a model's own text is unlike any other:
it repeats itself, above all when greedy, and copies from further back than a few layers learn to from ordinary
text. So in the last steps of a run every other step reads text that the model wrote. On that text only the exits
learn, from the last layer's distribution: the model is not taught its own words. A frozen model, which has nothing to
learn from other text, reads nothing but its own in those steps, and its later layers are not run.
"""

import numpy as np
import torch

from layerskip.checkpoint.whole_files import replacing
from train.blocks import Blocks, Mixture
from train.config import TrainConfig
from train.continuations import Sampling, continue_prompts
from train.engine import autocast, is_sharded
from train.packing import token_dtype
from train.setup import Run

OWN_TEXT = "own.bin"  # in the run's data/
_PROMPT_SHARE = 4  # the first 1/4 of a block is training text, the rest the model's


def reads_own_text(config: TrainConfig, step: int) -> bool:
    """Whether optimizer step `step` reads the model's own text: every other one of the last `data.own_text`, of a
    frozen model every one."""
    first = round(config.optim.max_steps * (1 - config.data.own_text))
    return step >= first and (config.recipe.freeze_model or (step - first) % 2 == 0)


def open_own_text(run: Run) -> Mixture:
    """The model's own text, written from the model as it is now unless it is there already.

    Every process calls this, at the same step; the first one writes, and a sharded model needs all to run it. A
    resumed run finds the text that was written before.
    """
    path = run.config.run.folder / "data" / OWN_TEXT
    is_main, there = run.accelerator.is_main_process, path.is_file()
    run.accelerator.wait_for_everyone()  # until all have looked
    if not there and (is_main or is_sharded(run.accelerator)):
        tokens = _continue_text(run)
        if is_main:
            with replacing(path) as partial:
                partial.write_bytes(np.ascontiguousarray(tokens.numpy().astype(_dtype(run))).tobytes())
    run.accelerator.wait_for_everyone()
    return Mixture([Blocks(path, _dtype(run), run.config.data.sequence_length)], [1.0])


def _dtype(run: Run) -> np.dtype:  # type: ignore[type-arg]
    return token_dtype(len(run.data.tokenizer))


def _continue_text(run: Run) -> torch.Tensor:
    """Blocks of training text that the model goes on with, half of them greedy and half sampled:
    (own_text_rows, sequence_length) ids. Rows have one length: a new document begins after an end."""
    data, seed = run.config.data, run.config.run.seed
    prompts = run.data.train.first(data.own_text_rows).input_ids[:, : data.sequence_length // _PROMPT_SHARE]
    model = run.accelerator.unwrap_model(run.model)
    greedy, sampled = prompts.tensor_split(2)
    seeds = np.random.SeedSequence([seed, len(prompts)]).generate_state(len(sampled)).tolist()
    padding = run.data.tokenizer.eos_token_id
    length = data.sequence_length - prompts.shape[1]
    with autocast(run.accelerator, run.config):
        rows = continue_prompts(model, list(greedy), length, padding)
        if len(sampled):
            rows += continue_prompts(model, list(sampled), length, padding, seeds=seeds, sampling=Sampling())
    return torch.cat([prompts, torch.stack(rows)], dim=1)
