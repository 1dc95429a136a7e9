"""`python -m train regenerate CONFIG --output FILE`: the model answers the prompts of `data` itself.

An exit must predict what the whole model says, so the model's own answers are the best text to train exits on. The
prompts of a text are its beginnings; of a conversation, all up to its last answer. Every row is written with a seed
of its own and in the same batches however often the command was stopped, so the file is the same in the end.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.config import TrainConfig
from train.errors import ConfigError, check
from train.regenerate_options import RegenerateOptions, flag

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from train.answers import Answers
    from train.asking import Prompt
    from train.chat import ChatTemplate


def run(arguments: argparse.Namespace, config: TrainConfig) -> int:
    """Write the answers; returns 0. Raises `ConfigError` and `TrainingError` as the training does."""
    options = RegenerateOptions(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(RegenerateOptions)})
    config = _with_trained_model(config)
    kinds = {source.is_chat for source in config.data.all_sources}
    check(len(kinds) == 1, "data.sources has conversations and texts; regenerate the one, then the other")

    from train.answers import Answers
    from train.asking import read_prompts
    from train.console import Reporter

    reporter = Reporter(True)
    if options.output.is_file():
        reporter.say(f"{options.output} is there already; delete it to write it anew")
        return 0
    # The model is read after the prompts: what is wrong with those is told first.
    tokenizer, template = _tokenizer(config)
    prompts = read_prompts(config, options, tokenizer, template, reporter)
    with Answers(options.output, fingerprint(options, config), options.keep_unfinished) as answers:
        _answer_all(_model(config), tokenizer, prompts, options, config, answers)
        written, left_out = answers.finish()
    reporter.say(f"wrote {options.output}: {written} rows" + (f"; left out: {left_out}" if left_out else ""))
    columns = "data.messages_column=messages" if template is not None else "data.text_column=text"
    reporter.say(f"train on it with: data.path={options.output} {columns} data.group_column=group")
    return 0


def _with_trained_model(config: TrainConfig) -> TrainConfig:
    """The config, with the run's finished checkpoint for a model that is trained from scratch."""
    if config.model.name_or_path is not None:
        return config
    folder = config.run.folder
    if not (folder / "config.json").is_file():
        raise ConfigError(f"regenerate needs a trained model: give model.name_or_path; {folder} holds none yet")
    model = dataclasses.replace(config.model, name_or_path=str(folder), architecture={})
    tokenizer = dataclasses.replace(config.tokenizer, name_or_path=None, train_vocab_size=None)
    return dataclasses.replace(config, model=model, tokenizer=tokenizer)


def fingerprint(options: RegenerateOptions, config: TrainConfig) -> dict[str, Any]:
    """What makes an answer the one it is, by the name a user gives it."""
    names = [f.name for f in dataclasses.fields(options) if f.name not in ("output", "keep_unfinished")]
    named = {flag(name): getattr(options, name) for name in names}
    for section in ("model", "tokenizer", "data"):
        values = dataclasses.asdict(getattr(config, section))
        named |= {f"{section}.{key}": value for key, value in values.items()}
    return named | {"run.seed": config.run.seed}


def _tokenizer(config: TrainConfig) -> "tuple[PreTrainedTokenizerBase, ChatTemplate | None]":
    from train.chat import ChatTemplate
    from train.vocabulary import build_tokenizer

    tokenizer = build_tokenizer(config, ())
    return tokenizer, ChatTemplate(tokenizer) if config.data.all_sources[0].is_chat else None


def _model(config: TrainConfig) -> "PreTrainedModel":
    """The model in `model.dtype`, on the accelerator if there is one."""
    import torch

    from train.model import decide_dtypes, load_model, this_device

    if config.run.cpu_threads is not None:
        torch.set_num_threads(config.run.cpu_threads)
    dtype = getattr(torch, decide_dtypes(config).model.dtype)
    return load_model(config, str(config.model.name_or_path), dtype).eval().to(this_device())


def _answer_all(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: "Sequence[Prompt]",
    options: RegenerateOptions,
    config: TrainConfig,
    answers: "Answers",
) -> None:
    """Answer the prompts batch by batch, but for batches that were answered before the command was stopped."""
    import numpy as np
    import torch

    from train.console import counting
    from train.continuations import Sampling, continue_prompts, end_ids
    from train.vocabulary import padding_id

    ends = end_ids(model, tokenizer.eos_token_id)
    sampling = Sampling(options.temperature, options.top_k or None, options.top_p) if options.temperature else None
    with counting("answers", len(prompts)) as count:
        for start in range(0, len(prompts), options.batch_size):
            batch = prompts[start : start + options.batch_size]
            missing = [prompt for prompt in batch if prompt.row not in answers]
            if missing:  # all of the batch is computed again: in another batch rounding may differ
                seeds = [int(np.random.SeedSequence([config.run.seed, p.row]).generate_state(1)[0]) for p in batch]
                texts = continue_prompts(
                    model,
                    [prompt.ids for prompt in batch],
                    options.max_new_tokens,
                    padding_id(tokenizer),
                    ends,
                    seeds if sampling is not None else None,
                    sampling,
                )
                for prompt, new in zip(batch, texts, strict=True):
                    if prompt.row not in answers:
                        finished = bool(torch.isin(new[-1:], torch.tensor(ends)).any())
                        answers.add(prompt.row, *_record(prompt, new, finished, tokenizer))
            count(len(batch))


def _record(
    prompt: "Prompt",
    new: "torch.Tensor",
    finished: bool,
    tokenizer: "PreTrainedTokenizerBase",
) -> tuple[dict[str, Any] | None, str]:
    """The line to write, and why it is left out if it is; an answer that was cut off is both."""
    from train.messages import asked

    document = prompt.document
    if document.messages:
        said = str(tokenizer.decode(new, skip_special_tokens=True)).strip()
        if not said:
            return None, "empty"
        messages = [*map(dict, asked(document.messages)), {"role": "assistant", "content": said}]
        reason = "" if finished else "unfinished (raise --max-new-tokens, or --keep-unfinished)"
        return {"messages": messages, "group": document.group}, reason
    # Decoded together, or a character over the border would be lost; one that the cut splits is left out.
    given = str(tokenizer.decode(prompt.ids, skip_special_tokens=True)).rstrip("\ufffd")
    text = str(tokenizer.decode([*prompt.ids, *new], skip_special_tokens=True)).rstrip("\ufffd")
    if not text.startswith(given) or len(text) == len(given):
        return None, "empty"
    return {"text": text, "prompt": given, "completion": text[len(given) :], "group": document.group}, ""
