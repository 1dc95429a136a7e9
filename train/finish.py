"""The ends of a run: how good the exits are before it, and the finished checkpoint after it.

Settings are chosen on the validation split; the numbers that are reported come from the test split.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from layerskip.checkpoint.settings import Setting, carry, store_setting
from layerskip.checkpoint.vocabulary import store_draft_vocabulary
from layerskip.checkpoint.whole_files import read_json, write_json
from layerskip.forecast import Forecast
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.share.card import write_model_card
from train import before_after
from train.best import choose_export, export_rule
from train.blocks import Mixture
from train.checkpoint import save_model
from train.console import Reporter
from train.costs import machine
from train.disk import writing, writing_alone
from train.draft_vocabulary import DraftVocabulary, choose_draft_vocabulary, record_of
from train.engine import is_sharded
from train.evaluate import Evaluation, report
from train.hub import Uploads
from train.report import try_report
from train.samples import write_samples
from train.setup import Run
from train.tracking import Tracker

_EVALUATION = "evaluation.json"


def record_before(run: Run, reporter: Reporter, tracker: Tracker) -> None:
    """Measure the model as it came, into evaluation.json as "before"; every process calls this."""
    evaluations = _measure_both(run, reporter, tracker)
    write_samples(run, tracker)
    if run.accelerator.is_main_process:
        record = {"before": {split: evaluation.record() for split, evaluation in evaluations.items()}}
        _write_record(run, record)


def is_finished(run: Run) -> bool:
    """Whether `finish` has been through for this number of steps, and exported what `best.export` asks for."""
    record = read_json(run.config.run.folder / _EVALUATION)
    exported = record.get("exported", {}).get("rule") == export_rule(run.config)
    vocabulary = (record.get("draft_vocabulary") or {}).get("size")
    exported = exported and vocabulary == run.config.data.draft_vocabulary
    return exported and record.get("steps") == run.progress.step >= run.config.optim.max_steps


def finish(run: Run, reporter: Reporter, tracker: Tracker, uploads: Uploads) -> None:
    """Choose the decoding setting, write the finished checkpoint and the report, and begin the upload if asked to.

    Every process calls this. evaluation.json is written after the checkpoint, and gets its "exported" after the card
    that is made from it: that says that all is there.
    """
    folder, main = run.config.run.folder, run.accelerator.is_main_process
    report(run.evaluator.measure(run.model, run.data.validation), "validation", run.progress.step, reporter, tracker)
    write_samples(run, tracker)
    exported = choose_export(run, reporter, tracker)
    evaluations = {split: run.evaluator.measure(run.model, text) for split, text in _held_out(run).items()}
    report(evaluations["test"], "test", exported, reporter, tracker)
    vocabulary = _choose_vocabulary(run, reporter) if main else None
    setting = _choose_setting(run, reporter, vocabulary)
    model = run.accelerator.unwrap_model(run.model)
    exits = evaluations["test"].record()["exits"]
    kept = ("loss", "agreement", "overlap")
    carry(model.config, exits={e: {name: numbers[name] for name in kept} for e, numbers in exits.items()})
    _save_finished(run, folder, vocabulary)
    if main:
        record = _final_record(run, evaluations, setting, exported)
        record["draft_vocabulary"] = record_of(vocabulary, run.config)
        _write_record(run, {name: value for name, value in record.items() if name != "exported"})
        _compare(record, run, reporter, tracker)
        with writing_alone(folder / "README.md"):
            write_model_card(folder, run.config.hub.repo, run.config.hub.license)
        _write_record(run, record)
        if run.config.tracking.report:
            try_report(folder, reporter)
        reporter.say(f"finished: {folder} holds the checkpoint; python -m infer chat {folder}")
        uploads.finished()
    run.accelerator.wait_for_everyone()


def _write_record(run: Run, record: dict[str, Any]) -> None:
    path = run.config.run.folder / _EVALUATION
    with writing_alone(path):
        write_json(path, record)


def _held_out(run: Run) -> dict[str, Mixture]:
    return {"validation": run.data.validation, "test": run.data.test}


def _measure_both(run: Run, reporter: Reporter, tracker: Tracker) -> dict[str, Evaluation]:
    evaluations = {split: run.evaluator.measure(run.model, text) for split, text in _held_out(run).items()}
    for split, evaluation in evaluations.items():
        report(evaluation, split, run.progress.step, reporter, tracker)
    return evaluations


def _compare(record: dict[str, Any], run: Run, reporter: Reporter, tracker: Tracker) -> None:
    """Show and log the last layer and the exits before and after."""
    table = before_after.rows(record)
    title = f"held-out test text before training, and after {record['exported']['step']} steps"
    if table:
        reporter.table(title, list(before_after.COLUMNS), table)
    if change := before_after.last_layer(record):
        tracker.log(run.progress.step, "summary", {"last": change})


def _choose_setting(
    run: Run, reporter: Reporter, vocabulary: DraftVocabulary | UnsupportedModelError | None
) -> dict[str, Any] | None:
    """Store the best setting for continuing validation text in the model; returns it with its forecast on test."""
    model = run.accelerator.unwrap_model(run.model)
    token_ids = vocabulary.token_ids if isinstance(vocabulary, DraftVocabulary) else None
    chosen = run.evaluator.forecast(model, run.data.validation, token_ids)
    if not chosen:
        if run.accelerator.is_main_process:
            folder = run.config.run.folder
            reporter.say(
                "no setting chosen: the stages were not timed (a sharded model), or the model ends its texts at once; "
                f"measure some: python -m infer benchmark {folder} --exit-layers 2,4 --num-draft-tokens 3,6"
            )
        return None
    setting = _setting_of(chosen[0])
    store_setting(model, setting)
    on_test = run.evaluator.forecast(model, run.data.test, token_ids)
    tested = next((forecast for forecast in on_test if _setting_of(forecast) == setting), chosen[0])
    reporter.say(_describe(setting, tested, token_ids is not None, machine(run.accelerator, run.config)["dtype"]))
    forecast = {"mean_acceptance_length": tested.mean_acceptance_length, "speedup": tested.speedup}
    return {
        "exit_layer": setting.exit_layer,
        "num_draft_tokens": setting.num_draft_tokens,
        "draft_vocabulary": setting.draft_vocabulary,
        "chosen_on": "validation",
        "forecast": forecast | ({} if tested.interval is None else {"interval": list(tested.interval)}),
    }


def _setting_of(forecast: Forecast) -> Setting:
    return Setting(forecast.exit_layer, forecast.num_draft_tokens, draft_vocabulary=forecast.draft_vocabulary)


def _describe(setting: Setting, tested: Forecast, has_vocabulary: bool, dtype: str) -> str:
    head = f", with the {'draft vocabulary' if setting.draft_vocabulary else 'whole head'}" if has_vocabulary else ""
    low_high = "" if tested.interval is None else " (9 in 10: {:.2f} to {:.2f})".format(*tested.interval)
    return (
        f"setting: exit_layer {setting.exit_layer}, num_draft_tokens {setting.num_draft_tokens}{head}, the fastest "
        f"where the model itself continues validation prompts in {dtype}. Continuing test prompts: "
        f"{tested.mean_acceptance_length:.2f} tokens a verify step, {tested.speedup:.2f}x plain decoding{low_high}"
        + ("" if tested.speedup > 1 else " (no gain yet: train longer or choose shallower recipe.exits)")
        + ". The tables above are on held-out text that others wrote, where the numbers differ."
    )


def _choose_vocabulary(run: Run, reporter: Reporter) -> DraftVocabulary | UnsupportedModelError | None:
    """The draft vocabulary that was asked for; on the first process."""
    tokenizer, model = run.data.tokenizer, run.accelerator.unwrap_model(run.model)
    try:
        found = choose_draft_vocabulary(run.config, tokenizer, model, not is_sharded(run.accelerator))
    except UnsupportedModelError as error:
        reporter.say(f"no draft vocabulary: {error}")
        return error
    if found is not None:
        reporter.say(
            f"draft vocabulary: {len(found.token_ids):,} of {len(tokenizer):,} tokens, "
            f"{found.coverage:.2%} of the held-out test text"
        )
    return found


def _save_finished(run: Run, folder: Path, vocabulary: DraftVocabulary | UnsupportedModelError | None) -> None:
    """Write the checkpoint beside, then move its files into the run folder, config.json last."""
    partial = folder / "finished.partial"
    dtype = getattr(torch, run.config.model.save_dtype)
    main = run.accelerator.is_main_process
    with writing(run.accelerator, partial):
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
    save_model(run.accelerator, run.model, run.data.tokenizer, partial, dtype)
    with writing(run.accelerator, partial):
        if main and isinstance(vocabulary, DraftVocabulary):
            store_draft_vocabulary(partial, vocabulary.token_ids)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json") if main else ():
            os.replace(path, folder / path.name)
        if main:
            partial.rmdir()


def _final_record(
    run: Run, evaluations: dict[str, Evaluation], setting: dict[str, Any] | None, exported: int
) -> dict[str, Any]:
    """evaluation.json: before and after, the setting, which step was exported, and how the stages were timed."""
    return {
        "before": read_json(run.config.run.folder / _EVALUATION).get("before"),
        "after": {split: evaluation.record() for split, evaluation in evaluations.items()},
        "setting": setting,
        "exported": {"rule": export_rule(run.config), "step": exported},
        "steps": run.progress.step,
        "tokens": run.progress.tokens,
        "forecast_conditions": machine(run.accelerator, run.config),
    }
