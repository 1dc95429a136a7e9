"""What `tune` forecasts from: the model's own continuations, teacher-forced once, and timings of the stages."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from infer.batches import answers
from infer.errors import InputError
from infer.loading import Loaded
from infer.setting import check_tree
from infer.terminal import Advance, Terminal
from infer.tune import TuneOptions
from infer.tuning.choice import OFF
from layerskip.checkpoint.vocabulary import draft_vocabulary_of
from layerskip.draft.exits import trained_exits
from layerskip.forecast import (
    Costs,
    ExitMeasurement,
    Forecast,
    best_setting,
    measure_bookkeeping,
    measure_costs,
    measure_exits,
    paper_costs,
)
from layerskip.model.anatomy import UnsupportedModelError, num_layers
from layerskip.model.stages import Stages
from layerskip.model.tree import parse_shape
from layerskip.training.objective import IGNORE_INDEX

_MOST_EXITS = 8  # more trained exits than this: only those in the first third are asked
_REPEATS = 3  # of each timing, at least
_SECONDS = 2.0  # for the timings of an exit, if they take less
_MOST_TIMED = 3  # exits, where none were asked for: those that are best on paper
Trees = Sequence[str | tuple[int, ...]]


@dataclass(frozen=True)
class Evidence:
    """What the forecasts are made of."""

    measured: dict[int, ExitMeasurement]
    costs: Costs
    forecasts: list[Forecast]
    has_vocabulary: bool


def candidates(config: PreTrainedConfig, num_layers: int) -> list[int]:
    """Exit layers to choose from: those the checkpoint's recipe trained; where it has none, or they are many, those in
    the first third of the layers, where drafts are cheap."""
    third = list(range(1, max(1, num_layers // 3) + 1))
    trained = tuple(exit_layer for exit_layer in trained_exits(config, num_layers) if exit_layer < num_layers)
    few = trained if len(trained) <= _MOST_EXITS else tuple(e for e in trained if e in third)
    return list(few) or third


def look(loaded: Loaded, options: TuneOptions, prompts: Sequence[Tensor], terminal: Terminal) -> Evidence:
    """Continue the prompts, measure all exits on that, time the stages.

    Raises:
        InputError: if the model cannot be cut, or ends its texts at once.
    """
    exits = list(options.exit_layers or candidates(loaded.model.config, num_layers(loaded.model)))
    vocabulary = draft_vocabulary_of(loaded.model)
    trees, longest, sampled = trees_of(loaded, options), options.max_draft_tokens, options.temperature > 0
    num_timed = len(exits) if options.exit_layers else min(len(exits), _MOST_TIMED)
    with terminal.progress(1 + len(prompts) + num_timed + 1) as advance:
        texts = continuations(loaded, options, prompts)
        advance("continued the prompts")
        try:
            measured = measure_texts(loaded, options, exits, trees, _told(texts, advance))
            paper = paper_costs(loaded.model, exits, vocabulary, trees=bool(trees))
            on_paper = best_setting(measured, paper, longest, sampled, trees)
            if not on_paper:
                raise InputError(f"{loaded.name} ends its texts at once: give other --prompts, like those it will see")
            timed = list(dict.fromkeys(forecast.exit_layer for forecast in on_paper))[:num_timed]
            costs = time_costs(loaded, options, timed, trees, texts, advance)
        except UnsupportedModelError as error:
            raise InputError(str(error)) from None
    return Evidence(measured, costs, best_setting(measured, costs, longest, sampled, trees), vocabulary is not None)


def trees_of(loaded: Loaded, options: TuneOptions) -> Trees:
    """The trees to choose from: none where the model cannot take them, and none that is deeper than chains may be."""
    for tree in options.trees:
        check_tree(tree)
    try:
        if options.trees:
            Stages(loaded.model, None).check_blocks(branching=True)
    except UnsupportedModelError:
        return ()
    return [tree for tree in options.trees if len(parse_shape(tree).widths) <= options.max_draft_tokens]


def measure_texts(
    loaded: Loaded, options: TuneOptions, exits: Sequence[int], trees: Trees, texts: Iterable[dict[str, Tensor]]
) -> dict[int, ExitMeasurement]:
    """The exits on texts of `continuations`, by the decoding that is tuned for."""
    return measure_exits(
        loaded.model,
        texts,
        exits,
        temperature=options.temperature or 1.0,
        top_p=options.top_p or 1.0,
        draft_vocabulary=draft_vocabulary_of(loaded.model),
        branches=max((width for tree in trees for width in parse_shape(tree).widths), default=0),
        sampled=options.temperature > 0,
    )


def continuations(loaded: Loaded, options: TuneOptions, prompts: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Each prompt with what the model itself says next, decoded plainly, all together where the model can: inputs of
    `measure_exits`, (1, length) each, of which the continuations count."""
    rows = [prompt[0].tolist() for prompt in prompts]
    try:
        Stages(loaded.model, None).check_blocks(branching=False)
        batch_size = len(rows)
    except UnsupportedModelError:
        batch_size = 1
    texts = []
    for row, answer in zip(rows, answers(loaded, rows, OFF, options.decoding(), batch_size), strict=True):
        ids = torch.tensor([row + answer.tokens], device=loaded.model.device)  # (1, length)
        labels = ids.clone()
        labels[:, : len(row)] = IGNORE_INDEX
        texts.append({"input_ids": ids, "labels": labels})
    return texts


def _told(texts: Sequence[dict[str, Tensor]], advance: Advance) -> Iterator[dict[str, Tensor]]:
    for inputs in texts:
        advance("comparing the exits")
        yield inputs


def time_costs(
    loaded: Loaded,
    options: TuneOptions,
    exits: Sequence[int],
    trees: Trees,
    texts: Sequence[dict[str, Tensor]],
    advance: Advance,
) -> Costs:
    """The stages in the middle of these outputs, and the loop around them."""
    longest = options.max_draft_tokens
    context = sum(inputs["input_ids"].shape[1] for inputs in texts) // len(texts) - options.max_new_tokens // 2
    costs = measure_costs(
        loaded.model,
        exits,
        longest,
        context,
        _REPEATS,
        draft_vocabulary_of(loaded.model),
        lambda exit_layer: advance(f"timed exit {exit_layer}"),
        trees,
        _SECONDS,
    )
    arguments = options.decoding().generate_arguments()
    bookkeeping = measure_bookkeeping(loaded.model, longest, _REPEATS, trees, **arguments)
    advance("timed the loop")
    return replace(costs, bookkeeping=bookkeeping)
