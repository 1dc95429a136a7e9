"""Many prompts, decoded in batches: a line of JSON for each, in order."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

import layerskip
from infer.errors import InputError
from infer.grammar import compile_grammar, unfinished
from infer.loading import Loaded
from infer.options import DecodingOptions, ModelOptions
from infer.setting import load_to_decode
from infer.speculation import in_flags
from infer.streaming import check_room
from infer.tally import Tally
from infer.terminal import Terminal
from layerskip.checkpoint.settings import Setting
from layerskip.decode.stats import Statistics
from layerskip.decode.streaming import pad_left


@dataclass(frozen=True)
class Answer:
    """What one row of a batch brought.

    Attributes:
        tokens: new token ids, the end-of-sequence token among them if there is one.
        statistics: of the row's steps; its seconds are its share of the batch's.
    """

    tokens: list[int]
    statistics: Statistics

    def record(self, loaded: Loaded, prompt: str) -> dict[str, Any]:
        """For JSON."""
        counts = self.statistics
        return {
            "prompt": prompt,
            "text": loaded.tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "tokens": counts.num_tokens,
            "verify_steps": counts.num_steps,
            "mean_acceptance_length": round(counts.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(counts.draft_acceptance_rate, 4) if counts.num_drafted else None,
        }


def generate_batches(
    model: ModelOptions,
    options: DecodingOptions,
    prompts: Sequence[str],
    batch_size: int,
    terminal: Terminal,
    verbose: bool,
    definition: str | None = None,
) -> int:
    """Load the model, continue all prompts, and say how it went; returns the exit code.

    Greedy outputs, and those of acceptance "coupled", depend neither on the other rows nor on the batch size.

    Args:
        definition: of the grammar whose texts alone may be written; None is free text.

    Raises:
        InputError: if the model or a prompt cannot be used.
    """
    loaded, setting = load_to_decode(model, options, terminal)
    if definition is not None:
        options = replace(options, grammar=compile_grammar(definition, loaded))
    rows = _encode(loaded, prompts, options)
    tally, complete, start = Tally(), True, perf_counter()
    for number, answer in enumerate(answers(loaded, rows, setting, options, batch_size)):
        terminal.write(json.dumps(answer.record(loaded, prompts[number]), ensure_ascii=False) + "\n")
        own = Tally(answer.statistics)
        if verbose:
            counts = answer.statistics
            terminal.note(f"{number + 1}: {counts.num_tokens} tokens, {counts.num_steps} verify steps, {own.rates()}")
        if options.grammar is not None and not options.grammar.accepts(answer.tokens):
            terminal.note(f"{number + 1}: {unfinished(len(answer.tokens), options.max_new_tokens)}")
            complete = False
        tally.merge(own)
    tally.seconds = perf_counter() - start
    terminal.note(f"{len(prompts)} prompts, {min(batch_size, len(prompts))} together: {tally.line()}")
    if verbose:
        terminal.note(tally.details())
    return 0 if complete else 1


def answers(
    loaded: Loaded, rows: Sequence[Sequence[int]], setting: Setting, options: DecodingOptions, batch_size: int
) -> Iterator[Answer]:
    """Continue the rows' token ids, `batch_size` together, in order."""
    for first in range(0, len(rows), batch_size):
        yield from _decode(loaded, rows[first : first + batch_size], setting, options, first)


def _decode(
    loaded: Loaded, rows: Sequence[Sequence[int]], setting: Setting, options: DecodingOptions, first: int
) -> Iterator[Answer]:
    device = loaded.model.device
    input_ids, mask = pad_left(rows, loaded.padding)
    try:
        output = layerskip.generate(
            loaded.model,
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            tokenizer=loaded.tokenizer,
            return_dict_in_generate=True,
            **vars(setting),
            **options.generate_arguments() | _randomness(options, device, range(first, first + len(rows))),
        )
    except ValueError as error:  # refused before anything was decoded
        raise InputError(in_flags(error)) from error
    assert isinstance(output, layerskip.SelfSpeculativeOutput)
    assert output.row_statistics is not None
    new = cast(Tensor, output.sequences)[:, input_ids.shape[1] :].tolist()
    for tokens, statistics in zip(new, output.row_statistics, strict=True):
        yield Answer(tokens[: statistics.num_tokens], statistics)


def _randomness(options: DecodingOptions, device: torch.device, numbers: range) -> dict[str, Any]:
    """To every prompt its own, by its number in the file."""
    if options.seed is None or options.temperature == 0:
        return {}
    seeds = [options.seed + number for number in numbers]
    if options.acceptance == "coupled":
        return {"seed": seeds}
    return {"generator": [torch.Generator(device).manual_seed(seed) for seed in seeds]}


def _encode(loaded: Loaded, prompts: Sequence[str], options: DecodingOptions) -> list[list[int]]:
    rows = [list(loaded.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    for number, row in enumerate(rows, start=1):
        try:
            check_room(loaded, len(row), options.max_new_tokens)
        except InputError as error:
            raise InputError(f"prompt {number}: {error}") from None
    return rows
