"""`evaluate` itself: which exits, on text and on tasks; tables, then one line of JSON."""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from infer.benchmarking.output import name_of
from infer.conditions import conditions
from infer.evaluating import report as evaluation_report
from infer.evaluating.text import measure_text
from infer.evaluation import EvaluateOptions
from infer.files import write_record
from infer.loading import Loaded, load
from infer.options import ModelOptions
from infer.setting import choose_setting
from infer.terminal import Terminal
from infer.tuning.evidence import candidates
from layerskip.checkpoint.settings import Setting
from layerskip.model.anatomy import num_layers


def evaluate(
    model: ModelOptions, options: EvaluateOptions, texts: Sequence[str], source: str, terminal: Terminal
) -> int:
    """Measure the exits on the texts, if there are any, and on the tasks, if any are asked for; returns 0.

    Args:
        source: where the texts are from, in words.

    Raises:
        InputError: if the model, the texts or the tasks cannot be used.
    """
    loaded = load(model, options.exit_layers or ())
    setting = find_setting(loaded, options)
    exits = find_exits(loaded, options, setting)
    result: dict[str, Any] = {"model": name_of(loaded), "conditions": conditions(loaded.model)}
    if texts:
        measured = measure_text(loaded, texts, options, exits, terminal)
        result["conditions"] |= {"text": source} | measured["conditions"]
        result["exits"] = measured["exits"]
        evaluation_report.show_text(result, terminal)
    if options.tasks:
        from infer.evaluating.tasks import measure_tasks  # here: lm-evaluation-harness is an extra, and slow to import

        asked = {name: getattr(options, name) for name in ("limit", "num_fewshot", "chat_template", "batch_size")}
        result["conditions"] |= {"lm_eval": importlib.metadata.version("lm_eval"), **asked}
        if setting is None:
            terminal.note(f"{loaded.name} carries no tuned setting: give --exit-layers, or run tune --write before")
        result["tasks"] = measure_tasks(loaded, options, task_exits(options, exits, setting), setting, terminal)
        evaluation_report.show_tasks(result, terminal)
    write_record(result, options.json)
    return 0


def find_setting(loaded: Loaded, options: EvaluateOptions) -> Setting | None:
    """What self-speculative decoding is done with: what the checkpoint was tuned to, else the first exit asked for."""
    setting = choose_setting(loaded, "tuned", "tuned")
    if setting is None and options.exit_layers:
        setting = choose_setting(loaded, options.exit_layers[0], "tuned")
    return setting


def find_exits(loaded: Loaded, options: EvaluateOptions, setting: Setting | None) -> list[int]:
    """The exits to measure: those asked for; else those that were trained and the tuned one, else the first third."""
    layers = num_layers(loaded.model)
    if options.all_exits:
        return list(range(1, layers))
    if options.exit_layers:
        return list(options.exit_layers)
    return sorted({*candidates(loaded.model.config, layers), *tuned_exits(setting)})


def task_exits(options: EvaluateOptions, exits: Sequence[int], setting: Setting | None) -> list[int]:
    """The exits that are asked the tasks too, which takes longer: those asked for, else the tuned one."""
    if options.exit_layers or options.all_exits:
        return list(exits)
    return tuned_exits(setting)


def tuned_exits(setting: Setting | None) -> list[int]:
    """The exit of a setting that has one of its own."""
    return [setting.exit_layer] if setting is not None and isinstance(setting.exit_layer, int) else []
