"""The exports themselves: what is copied, changed and written."""

import shutil
from pathlib import Path
from typing import Any

from transformers.utils import logging

from infer.errors import InputError
from infer.export import ExportOptions, exit_of
from infer.loading import Loaded, load
from infer.options import ModelOptions
from infer.terminal import Terminal
from layerskip.checkpoint.settings import carried, tuned_setting
from layerskip.custom_generate import remove_custom_generate, write_custom_generate
from layerskip.model.adapters import adapter_at
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.share import export

_COPIED = ("prompts", "custom_generate")  # folders; a run's checkpoints/, data/ and the like stay
DRAFT_NOTES = """\
transformers: model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained({folder!r}))
others take the folder as their draft model: docs/export.md has the commands"""
CARRIED_NOTES = """\
with trust_remote_code=True, AutoModelForCausalLM.from_pretrained({folder!r}, ...).generate(...) now drafts for itself
and so does: transformers serve {folder} --trust-remote-code"""


def change(
    model: ModelOptions, options: ExportOptions, setting: dict[str, Any], source: Path, terminal: Terminal
) -> dict[str, Any]:
    """Have the checkpoint, or a copy of it, carry its decoding or no longer; returns what was done.

    Raises:
        InputError: before anything is written, wherever the reason is known by then.
    """
    done: dict[str, Any] = {}
    exit_layer = None
    if options.assistant_early_exit:
        exit_layer = exit_of(options, setting, str(source))
        try_early_exit(load(model, [exit_layer]), exit_layer)
        terminal.note(
            "transformers drafts one sequence at a time, and refuses batches; it knows neither an exit's adapter nor a "
            "draft vocabulary"
        )
    target = source if options.output is None else copy_checkpoint(source, options.output, terminal)
    done["folder"] = str(target)
    if options.custom_generate:
        done["custom_generate"] = str(write_custom_generate(target))
        terminal.note(CARRIED_NOTES.format(folder=str(target)))
        if setting.get("exit_layer") is None and setting.get("lookup", "off") == "off":
            terminal.note("it is tuned to draft nothing, so it decodes plainly until it is tuned again")
    if exit_layer is not None:
        written = export.write_early_exit(target, exit_layer, _draft_tokens(setting, exit_layer))
        done |= {"assistant_early_exit": exit_layer, "generation_config": str(written)}
    if options.remove:
        done["removed"] = remove(target)
    return done


def try_early_exit(loaded: Loaded, exit_layer: int) -> None:
    """Raise `InputError` unless transformers' own early exit decodes the model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its assistant is called in ways that it warns of itself
    try:
        export.check_early_exit(loaded.model, exit_layer)
    except UnsupportedModelError as error:
        raise InputError(f"{error}: use --custom-generate instead") from None
    finally:
        logging.set_verbosity(verbosity)


def remove(folder: Path) -> list[str]:
    """Take out of the checkpoint what the two flags put in; returns what was there.

    Raises:
        InputError: if it is another's, or there is nothing.
    """
    try:
        removed = ["custom_generate"] if remove_custom_generate(folder) else []
    except ValueError as error:
        raise InputError(str(error)) from None
    if export.carries_early_exit(folder):
        export.write_early_exit(folder, None, None)
        removed.append("assistant_early_exit")
    if not removed:
        raise InputError(f"{folder} carries neither custom_generate nor assistant_early_exit: nothing to remove")
    return removed


def copy_checkpoint(source: Path, output: Path, terminal: Terminal) -> Path:
    """Copy the folder's files and those of `_COPIED`, not what training keeps in others; returns the copy."""
    found = [*source.iterdir(), *(path for name in _COPIED for path in (source / name).rglob("*"))]
    files = [path for path in found if path.is_file() and not path.name.startswith(".")]
    with terminal.progress(len(files)) as advance:
        for file in files:
            to = output / file.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
            advance(file.name)
    return output


def export_draft(
    model: ModelOptions, options: ExportOptions, setting: dict[str, Any], terminal: Terminal
) -> dict[str, Any]:
    """Write the draft with the tokenizer; returns what was written.

    Raises:
        InputError: if the model, the exit or its adapter will not do.
    """
    assert options.draft is not None
    loaded = load(model, ["tuned" if options.exit_layer is None else options.exit_layer], needs_vocabulary=False)
    setting = setting or _tuned(loaded)
    exit_layer = exit_of(options, setting, model.model)
    if model.dtype == "auto":
        loaded.model.to(loaded.model.config.dtype)  # as it is stored, where this machine computes in float32
    try:
        draft = export.export_draft(loaded.model, exit_layer, options.draft, _draft_tokens(setting, exit_layer))
    except ValueError as error:
        raise InputError(str(error)) from None
    loaded.tokenizer.save_pretrained(options.draft)
    if adapter_at(loaded.model, exit_layer) is not None:
        terminal.note(f"the adapter of exit {exit_layer} became one more layer, {exit_layer + 1} in all")
    if carried(loaded.model.config).get("draft_vocabulary"):
        terminal.note("the draft has the whole head: a checkpoint has one vocabulary, and it must be the target's")
    terminal.note(DRAFT_NOTES.format(folder=str(options.draft)))
    weights, all_weights = draft.num_parameters(), loaded.model.num_parameters()
    return {
        "folder": str(options.draft),
        "exit_layer": exit_layer,
        "num_hidden_layers": draft.config.get_text_config(decoder=True).num_hidden_layers,
        "parameters": weights,
        "share_of_target": round(weights / all_weights, 4),
        "dtype": str(draft.dtype).removeprefix("torch."),
    }


def _draft_tokens(setting: dict[str, Any], exit_layer: int) -> int | None:
    """What the checkpoint is tuned to, if it is to this exit and a number: transformers knows no "auto"."""
    tuned = setting.get("num_draft_tokens") if setting.get("exit_layer") == exit_layer else None
    return tuned if isinstance(tuned, int) and tuned > 0 else None


def _tuned(loaded: Loaded) -> dict[str, Any]:
    """Of a model on the Hub."""
    setting = tuned_setting(loaded.model)
    return {} if setting is None else {"exit_layer": setting.exit_layer, "num_draft_tokens": setting.num_draft_tokens}
