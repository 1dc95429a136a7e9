"""The tuning itself: one teacher-forced pass and a few timings make the forecasts, decoding confirms the best."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from infer import tune_report
from infer.arms import plain, plain_loop, self_speculative
from infer.batches import answers
from infer.benchmark import BenchmarkOptions
from infer.benchmark_output import name_of
from infer.comparison import encode, measure_arms
from infer.conditions import conditions
from infer.errors import InputError
from infer.loading import Loaded, load
from infer.measurement import Protocol
from infer.options import ModelOptions
from infer.prompts import Prompts
from infer.terminal import Advance, Terminal
from infer.tune import TuneOptions
from infer.tune_choice import OFF, decide, how_to_use, write_setting
from layerskip.anatomy import UnsupportedModelError, num_layers
from layerskip.costs import Costs, measure_bookkeeping, measure_costs, paper_costs
from layerskip.forecast import ExitMeasurement, Forecast, best_setting, measure_exits
from layerskip.objective import IGNORE_INDEX
from layerskip.recipe import Recipe
from layerskip.settings import Setting, carried
from layerskip.stages import Stages
from layerskip.vocabulary import draft_vocabulary_of

HOPELESS = 0.9  # a forecast below this is not measured
_NEAR = 0.95  # of the best forecast: the next one is measured too
_MOST_EXITS = 8  # more trained exits than this: only those in the first third are asked
_REPEATS = 4  # of each timing
_MOST_TIMED = 3  # exits, where none were asked for: those that are best on paper


@dataclass(frozen=True)
class Evidence:
    """What the forecasts are made of."""

    measured: dict[int, ExitMeasurement]
    costs: Costs
    forecasts: list[Forecast]
    has_vocabulary: bool


def tune(model: ModelOptions, options: TuneOptions, prompts: Prompts, folder: Path | None, terminal: Terminal) -> int:
    """Forecast all settings, confirm the best, show, and store it if asked to; returns the exit code, 0.

    Raises:
        InputError: if the model or the prompts cannot be used.
    """
    loaded = load(model, options.exit_layers or ())
    lengths = BenchmarkOptions(
        num_prompts=options.num_prompts, prompt_tokens=options.prompt_tokens, max_new_tokens=options.max_new_tokens
    )
    validation, test = (encode(loaded, texts, lengths) for texts in (prompts.validation, prompts.test))
    evidence = look(loaded, options, validation, terminal)
    test = test[: math.ceil(options.num_prompts / 2)]  # decoding them takes longer than all the rest
    records = confirm(loaded, options, evidence.forecasts, test, terminal)
    setting, reason = decide(evidence.forecasts, records)
    written = None
    if options.write and folder is not None:
        written = write_setting(folder, loaded, setting)
    counts = {"num_prompts": len(validation), "num_confirmed": len(test) if records else 0}
    found = conditions(loaded.model) | {"prompts": prompts.source, **_scope(options), **counts}
    result = tune_report.record(name_of(loaded), found, evidence, records, setting, reason)
    tune_report.show(result, terminal)
    if options.png is not None:
        tune_report.draw(result, options.png)
        terminal.note(f"drew {options.png}")
    terminal.note(how_to_use(model, options, setting) if written is None else f"wrote {written}")
    print(json.dumps(result, allow_nan=False))
    return 0


def _scope(options: TuneOptions) -> dict[str, Any]:
    names = ("prompt_tokens", "max_new_tokens", "temperature", "top_p", "seed")
    return {name: getattr(options, name) for name in names}


def candidates(config: PreTrainedConfig, num_layers: int) -> list[int]:
    """Exit layers to choose from: those the checkpoint's recipe trained; where it has none, or they are many, those in
    the first third of the layers, where drafts are cheap."""
    recipe = carried(config).get("recipe")
    third = list(range(1, max(1, num_layers // 3) + 1))
    try:
        known = {name: value for name, value in (recipe or {}).items() if name in Recipe.__dataclass_fields__}
        trained = Recipe(**known).trained_exits(num_layers) if recipe else ()
    except (TypeError, ValueError):  # of another version
        trained = ()
    trained = tuple(exit_layer for exit_layer in trained if exit_layer < num_layers)
    few = trained if len(trained) <= _MOST_EXITS else tuple(e for e in trained if e in third)
    return list(few) or third


def look(loaded: Loaded, options: TuneOptions, prompts: Sequence[Tensor], terminal: Terminal) -> Evidence:
    """Continue the prompts, measure all exits on that, time the stages.

    Raises:
        InputError: if the model cannot be cut, or ends its texts at once.
    """
    layers = num_layers(loaded.model)
    exits = list(options.exit_layers or candidates(loaded.model.config, layers))
    vocabulary = draft_vocabulary_of(loaded.model)
    sampled = options.temperature > 0
    num_timed = len(exits) if options.exit_layers else min(len(exits), _MOST_TIMED)
    with terminal.progress(1 + len(prompts) + num_timed + 1) as advance:
        texts = continuations(loaded, options, prompts)
        advance("continued the prompts")
        try:
            measured = measure_exits(
                loaded.model,
                _told(texts, advance),
                exits,
                temperature=options.temperature if sampled else 1.0,
                top_p=options.top_p or 1.0,
                draft_vocabulary=vocabulary,
            )
            on_paper = best_setting(
                measured, paper_costs(loaded.model, exits, vocabulary), options.max_draft_tokens, sampled
            )
            timed = list(dict.fromkeys(forecast.exit_layer for forecast in on_paper))[:num_timed]
            costs = time_costs(loaded, options, timed, texts, vocabulary, advance)
        except UnsupportedModelError as error:
            raise InputError(str(error)) from None
    forecasts = best_setting(measured, costs, options.max_draft_tokens, sampled)
    if not forecasts:
        raise InputError(f"{loaded.name} ends its texts at once: give other --prompts, like those it will see")
    return Evidence(measured, costs, forecasts, vocabulary is not None)


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
    texts: Sequence[dict[str, Tensor]],
    vocabulary: Tensor | None,
    advance: Advance,
) -> Costs:
    """The stages at the length of these texts, and the loop around them."""
    context = sum(inputs["input_ids"].shape[1] for inputs in texts) // len(texts)
    if loaded.max_positions is not None:
        context = min(context, loaded.max_positions - options.max_draft_tokens - 1)
    costs = measure_costs(
        loaded.model,
        exits,
        options.max_draft_tokens,
        max(1, context),
        _REPEATS,
        vocabulary,
        lambda exit_layer: advance(f"timed exit {exit_layer}"),
    )
    arguments = options.decoding().generate_arguments()
    bookkeeping = measure_bookkeeping(loaded.model, options.max_draft_tokens, _REPEATS, **arguments)
    advance("timed the loop")
    return replace(costs, bookkeeping=bookkeeping)


def setting_of(forecast: Forecast) -> Setting:
    """The setting that a forecast is about."""
    return Setting(forecast.exit_layer, forecast.num_draft_tokens, draft_vocabulary=forecast.draft_vocabulary)


def confirm(
    loaded: Loaded, options: TuneOptions, forecasts: Sequence[Forecast], prompts: Sequence[Tensor], terminal: Terminal
) -> list[dict[str, Any]]:
    """Decode held-out prompts plainly and with the best settings, interleaved.

    Returns:
        A record each, plain decoding first, this kit's loop without drafts second; none where the forecast leaves no
        hope.
    """
    best = [forecast for forecast in forecasts[:2] if forecast.speedup >= _NEAR * forecasts[0].speedup]
    if best[0].speedup < HOPELESS:
        return []
    arms = [plain(), plain_loop(), *(self_speculative(setting_of(forecast)) for forecast in best)]
    protocol = Protocol(prompts, options.decoding().generate_arguments(), seed=options.seed or 0)
    records = measure_arms(loaded, arms, protocol, terminal)
    for record, forecast in zip(records[2:], best, strict=True):
        record["draft_vocabulary"] = forecast.draft_vocabulary
        record["forecast_speedup"] = round(forecast.speedup, 4)
    return records
