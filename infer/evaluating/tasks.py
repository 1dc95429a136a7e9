"""Tasks of lm-evaluation-harness: the model, its exits alone, and self-speculative decoding, on the same questions."""

import difflib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from infer.errors import InputError, first_line
from infer.evaluating.sides import ExitSide, ModelSide, SelfSpeculativeSide
from infer.evaluation import EvaluateOptions
from infer.loading import Loaded
from infer.terminal import Terminal
from layerskip.checkpoint.settings import Setting

GENERATES = "generate_until"  # the harness's name for tasks whose answers are written


def measure_tasks(
    loaded: Loaded, options: EvaluateOptions, exits: Sequence[int], setting: Setting | None, terminal: Terminal
) -> list[dict[str, Any]]:
    """A record for each side: the model first, then its exits, and self-speculative decoding last.

    That last one is asked the tasks whose answers are written, in which alone there is something to draft, and is left
    out where there are none, or no `setting`.

    Raises:
        InputError: if a task is not known or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about arguments that are ours
    manager, names = find_tasks(options)
    ask = _asker(manager, options)
    terminal.note("tasks: the model")
    found = ask(ModelSide(loaded, options.batch_size), names)
    written = [task for task, config in found["configs"].items() if config["output_type"] == GENERATES]
    records: list[dict[str, Any]] = [{"side": "model", "exit_layer": None, "results": scores(found)}]
    for exit_layer in exits:
        terminal.note(f"tasks: exit {exit_layer} alone")
        other = ask(ExitSide(loaded, options.batch_size, exit_layer), names)
        record: dict[str, Any] = {"side": f"exit {exit_layer}", "exit_layer": exit_layer, "results": scores(other)}
        records.append(record | equal_answers(found, other, written))
    if setting is not None and setting.exit_layer is not None and written:
        terminal.note("tasks: self-speculative decoding")
        side = SelfSpeculativeSide(loaded, options.batch_size, setting)
        other = ask(side, written)
        record = {"side": "self-speculative", "exit_layer": setting.exit_layer, "results": scores(other)}
        rates = {
            "num_draft_tokens": setting.num_draft_tokens,
            "mean_acceptance_length": round(side.statistics.mean_acceptance_length, 4),
        }
        records.append(record | rates | equal_answers(found, other, written))
    return records


def find_tasks(options: EvaluateOptions) -> tuple[TaskManager, list[str]]:
    """The harness's index and the names of what was asked for; its own thousands of tasks are read only if needed.

    Raises:
        InputError: naming a task that nobody knows, and the nearest one.
    """
    folder = None if options.include_path is None else str(options.include_path)
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if all(manager.match_tasks([name]) for name in options.tasks):
            return manager, manager.match_tasks(list(options.tasks))
    manager = TaskManager(include_path=folder)
    for name in options.tasks:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            hint = f": did you mean {near[0]}?" if near else ": give its folder with --include-path"
            raise InputError(f"--tasks {name} is no task of lm-evaluation-harness{hint}")
    return manager, manager.match_tasks(list(options.tasks))


def _asker(manager: TaskManager, options: EvaluateOptions) -> Callable[[ModelSide, list[str]], dict[str, Any]]:
    def ask(side: ModelSide, names: list[str]) -> dict[str, Any]:
        try:
            results: dict[str, Any] = simple_evaluate(
                model=side,
                tasks=names,
                task_manager=manager,
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.chat_template,
                log_samples=True,
            )
        except OSError as error:  # no network, or no such file
            raise InputError(
                f"--tasks {','.join(names)} cannot be loaded ({first_line(error)}): the harness's own are on the Hub; "
                "give local ones with --include-path"
            ) from None
        except (ValueError, AssertionError) as error:  # a broken file, or answers that are too long for the model
            raise InputError(f"--tasks {','.join(names)} cannot be run: {first_line(error)}") from None
        return results

    return ask


def scores(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The harness's metrics of each task and group, under its own names."""
    records = []
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        for name, value in values.items():
            metric, _, filtered = name.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not filtered:
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            count = found.get("n-samples", {}).get(task, {}).get("effective")
            records.append(
                {"task": task, "metric": metric, "filter": filtered, "value": float(value)}
                | {"stderr": stderr if isinstance(stderr, int | float) else None, "num_documents": count}
            )
    return records


def equal_answers(found: dict[str, Any], other: dict[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """How many written answers of two sides are the same text; nothing where none are written."""
    if not tasks:
        return {}
    ours, theirs = (
        {(task, sample["doc_id"]): sample["resps"] for task in tasks for sample in each["samples"][task]}
        for each in (found, other)
    )
    return {"equal_answers": sum(theirs[key] == answer for key, answer in ours.items()), "num_answers": len(ours)}
