"""The setting that a command decodes with: its flags, completed by what the checkpoint carries."""

from collections.abc import Callable
from typing import Any

from infer.errors import InputError
from infer.loading import Loaded, load
from infer.options import DecodingOptions, ModelOptions
from infer.speculation import Auto, Tuned, in_flags
from infer.terminal import Terminal
from layerskip.checkpoint.resolving import resolve_setting
from layerskip.checkpoint.settings import DEFAULT_NUM_DRAFT_TOKENS, Setting, tuned_setting
from layerskip.forecast import tree_name
from layerskip.model.tree import parse_shape

_NO_EXIT = (
    "note: this checkpoint carries no tuned exit layer and is decoded plainly: give --exit-layer to draft, or have "
    "python -m infer tune MODEL --write choose one"
)


def load_to_decode(
    model: ModelOptions,
    options: DecodingOptions,
    terminal: Terminal,
    check: Callable[[Loaded], None] | None = None,
) -> tuple[Loaded, Setting]:
    """The model, and what was asked for completed by what it carries: plain decoding, with a note, if nothing is.

    Args:
        check: raises an `InputError` where the model does not do; asked before anything is said.

    Raises:
        InputError: before the weights are read wherever the reason is known by then.
    """
    if options.speculation.tree != "tuned":
        check_tree(options.speculation.tree)
    loaded = load(model, [options.speculation.exit_layer])
    asked = options.speculation.setting()
    setting = choose_setting(loaded, asked.pop("exit_layer"), asked.pop("num_draft_tokens"), **asked)
    if setting is not None and setting.grows_trees and options.acceptance == "block":  # a --tree was refused before
        tuned = tree_name(setting.tree or ())
        raise InputError(
            f"--acceptance block judges chains; this checkpoint is tuned to --tree {tuned}: give --num-draft-tokens "
            f"{DEFAULT_NUM_DRAFT_TOKENS} to override it"
        )
    if check is not None:
        check(loaded)
    if setting is None:
        terminal.note(_NO_EXIT)
        setting = Setting(None, 0)
    return loaded, setting


def check_tree(tree: str | tuple[int, ...]) -> None:
    """Raise `InputError` unless trees of this shape can be grown."""
    try:
        parse_shape(tree)
    except ValueError as error:
        raise InputError(in_flags(error)) from None


def choose_setting(
    loaded: Loaded, exit_layer: int | Auto | Tuned | None, num_draft_tokens: int | Auto | Tuned, **others: Any
) -> Setting | None:
    """What was asked for, completed by what the checkpoint carries.

    Args:
        others: further fields of `Setting`, or "tuned".

    Returns:
        None if the exit layer is left to the checkpoint and it carries none.

    Raises:
        InputError: if what the checkpoint carries does not fit it or what was asked for.
    """
    try:
        if exit_layer == "tuned" and others.get("lookup") != "only":
            tuned = tuned_setting(loaded.model)
            if tuned is None or (tuned.exit_layer is None and tuned.lookup == "off"):
                _refuse_without_exit(loaded.name, {"num_draft_tokens": num_draft_tokens, **others})
            if tuned is None:
                return None
        asked = {"exit_layer": exit_layer, "num_draft_tokens": num_draft_tokens, **others}
        return resolve_setting(loaded.model, **asked)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(in_flags(error)) from None


def _refuse_without_exit(name: str, asked: dict[str, Any]) -> None:
    """Raise `InputError` if something is asked of an early exit, and there is none."""
    idle = {"draft_vocabulary": False, "lookup": "off"}
    for field, value in asked.items():
        if value not in ("tuned", idle.get(field)):
            raise InputError(
                f"--{field.replace('_', '-')} goes with an early exit, and {name} carries no tuned one: "
                "give --exit-layer as well"
            )
