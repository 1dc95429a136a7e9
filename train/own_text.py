"""The model's own text: continuations of training text, for its exits to learn to follow.

What an exit must predict when decoding is what the whole model says, and a model's own text is unlike any other:
it repeats itself, above all when greedy, and copies from further back than a few layers learn to from ordinary
text. So in the last steps of a run every other step reads text that the model wrote. On that text only the exits
learn, from the last layer's distribution: the model is not taught its own words.
"""

import os
from pathlib import Path

import numpy as np
import torch

from train.config import TrainConfig
from train.engine import autocast
from train.packing import Blocks, token_dtype
from train.setup import Run

_FILE = "own.bin"
_PROMPT_SHARE = 4  # the first 1/4 of a block is training text, the rest the model's


def reads_own_text(config: TrainConfig, step: int) -> bool:
    """Whether optimizer step `step` reads the model's own text: every other one of the last `data.own_text`."""
    first = round(config.optim.max_steps * (1 - config.data.own_text))
    return step >= first and (step - first) % 2 == 0


def open_own_text(run: Run) -> Blocks:
    """The model's own text, written by the first process from the model as it is now unless it is there already.

    Every process calls this, at the same step. A resumed run finds the text that was written before.
    """
    path = run.config.run.folder / "data" / _FILE
    if run.accelerator.is_main_process and not path.is_file():
        _write(run, path)
    run.accelerator.wait_for_everyone()
    return Blocks(path, token_dtype(len(run.data.tokenizer)), run.config.data.sequence_length)


def _write(run: Run, path: Path) -> None:
    """Half of the rows greedy, half sampled: (own_text_rows, sequence_length) token ids."""
    data = run.config.data
    rows = run.data.train.rows(range(min(data.own_text_rows, len(run.data.train))))
    prompts = rows[:, : data.sequence_length // _PROMPT_SHARE].to(run.accelerator.device)
    model = run.accelerator.unwrap_model(run.model)
    training = model.training
    model.eval()
    try:
        with autocast(run.accelerator, run.config):
            texts = [
                model.generate(
                    some,
                    attention_mask=torch.ones_like(some),
                    do_sample=do_sample,
                    max_new_tokens=data.sequence_length - prompts.shape[1],
                    eos_token_id=None,  # rows of one length; a new document begins after an end
                    pad_token_id=run.data.tokenizer.eos_token_id,
                )
                for some, do_sample in zip(prompts.tensor_split(2), (False, True), strict=True)
                if len(some)
            ]
    finally:
        model.train(training)
    tokens = torch.cat(texts).cpu().numpy().astype(token_dtype(len(run.data.tokenizer)))
    partial = path.with_suffix(".partial")
    partial.write_bytes(np.ascontiguousarray(tokens).tobytes())
    os.replace(partial, path)
