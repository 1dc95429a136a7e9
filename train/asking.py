"""What the command `regenerate` asks the model: the prompts of the sources in `data`, as tokens."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from train.architecture import load_model_config, num_positions
from train.bad_rows import BadRowError, BadRows
from train.chat import ChatTemplate
from train.config import TrainConfig
from train.console import Reporter
from train.corpus import read_documents
from train.errors import TrainingError, check
from train.regenerate_options import RegenerateOptions
from train.rows import check_held_out
from train.splits import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompt(NamedTuple):
    """A row to be answered."""

    row: int  # its number, over all sources
    ids: torch.Tensor  # (length,)
    document: Document


def read_prompts(
    config: TrainConfig,
    options: RegenerateOptions,
    tokenizer: "PreTrainedTokenizerBase",
    template: ChatTemplate | None,
    reporter: Reporter,
) -> list[Prompt]:
    """The prompts of this part, the longest first, so that batches hold little padding and memory is tried early."""
    part, parts = map(int, options.part.split("/"))
    limit = _max_prompt(config, options)
    check_held_out(config.data.all_sources)
    prompts: list[Prompt] = []
    row = -1
    for source in config.data.all_sources:
        bad = BadRows(config.data.max_bad_rows)
        for document in read_documents(source, config.data.held_out, bad, needs_answers=False):
            row += 1
            if row % parts != part:
                continue
            try:
                ids = _prompt_ids(document, tokenizer, template, options)
                if limit is not None and len(ids) > limit:
                    raise BadRowError(f"has a prompt of {len(ids)} tokens; {limit} leave room for the answer")
            except BadRowError as error:
                bad.add(document.name, str(error))
            else:
                prompts.append(Prompt(row, ids, document))
        if report := bad.report():
            reporter.say(report)
    if not prompts:
        raise TrainingError("there is no prompt to answer in data; see the rows that were skipped")
    return sorted(prompts, key=lambda prompt: (-len(prompt.ids), prompt.row))


def _max_prompt(config: TrainConfig, options: RegenerateOptions) -> int | None:
    """The longest prompt that leaves room for an answer in the model's positions; None if they have no end."""
    positions = num_positions(load_model_config(str(config.model.name_or_path)))
    if positions is None:
        return None
    check(
        options.max_new_tokens < positions,
        f"--max-new-tokens is {options.max_new_tokens}; the model has {positions} positions, prompt included: lower it",
    )
    return positions - options.max_new_tokens


def _prompt_ids(
    document: Document,
    tokenizer: "PreTrainedTokenizerBase",
    template: ChatTemplate | None,
    options: RegenerateOptions,
) -> torch.Tensor:
    if template is not None:
        [ids] = template.tokenize([template.prompt(document.messages)])
        return torch.tensor(ids)
    given = document.text[: document.prompt_length] if document.prompt_length else document.text
    ids = tokenizer(given, verbose=False)["input_ids"]
    if not document.prompt_length:
        ids = ids[: min(options.prompt_tokens, max(1, len(ids) // 2))]
    return torch.tensor(ids)
