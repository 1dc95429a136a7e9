"""What the model writes: a few fixed held-out prompts, continued greedily at every evaluation."""

import math

from train.architecture import num_positions
from train.continuations import continue_prompts
from train.engine import autocast, is_sharded
from train.setup import Run
from train.tracking import Tracker
from train.vocabulary import padding_id

_PROMPT_TOKENS = 48  # the end of a longer prompt


def write_samples(run: Run, tracker: Tracker) -> None:
    """Continue the prompts and record the texts in samples.jsonl and the trackers. The first process does it alone,
    so a sharded engine, where all would have to take part, writes none."""
    tracking, accelerator = run.config.tracking, run.accelerator
    if not tracking.samples or not accelerator.is_main_process or is_sharded(accelerator):
        return
    model, tokenizer = accelerator.unwrap_model(run.model), run.data.tokenizer
    prompts = [prompt[-_PROMPT_TOKENS:] for prompt in run.data.validation.prompts(tracking.samples)]
    # Up to the model's last position: beyond it some families fail, and others write nonsense.
    room = (num_positions(model.config) or math.inf) - max(map(len, prompts))
    length = int(min(tracking.sample_tokens, max(1, room)))
    with autocast(accelerator, run.config):
        texts = continue_prompts(model, prompts, length, padding_id(tokenizer), [tokenizer.eos_token_id])
    records = [
        {"prompt": str(tokenizer.decode(prompt)), "continuation": str(tokenizer.decode(text))}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    tracker.log_samples(run.progress.step, records)
