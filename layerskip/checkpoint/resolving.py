"""What a call asks for, completed by what the checkpoint was tuned to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain, combinations
from typing import Any

from transformers import PreTrainedModel

from layerskip.checkpoint.settings import AUTO, DEFAULT_NUM_DRAFT_TOKENS, Setting, check_exit, tuned_setting
from layerskip.model.anatomy import num_layers

_CALLER = 5  # of warnings: whoever called generate, which calls prepare, prepare_session, resolve_setting
_HARMLESS = {"tree": None, "exit_layer": 1, "num_draft_tokens": DEFAULT_NUM_DRAFT_TOKENS, "lookup": "off"}


def resolve_setting(model: PreTrainedModel, **given: Any) -> Setting:
    """What a call asks for, completed by what the checkpoint carries: of each field its value, or "tuned".

    A length or a tree that is asked for replaces the other one of the checkpoint.

    Raises:
        ValueError: if one is out of range, or does not go with another, asked for or tuned.
    """
    asked = {name: value for name, value in given.items() if value != "tuned"}
    tuned = tuned_setting(model) if "exit_layer" not in asked or "num_draft_tokens" not in asked else None
    if "exit_layer" not in asked and tuned is None and asked.get("lookup", "off") != "only":
        warnings.warn(
            "this checkpoint carries no tuned exit layer, so it is decoded plainly: "
            f"give exit_layer=1 … {num_layers(model) - 1} (infer tune --write picks it), or exit_layer=None to say so",
            stacklevel=_CALLER,
        )
    base = {} if tuned is None else {field.name: getattr(tuned, field.name) for field in fields(Setting)}
    if "num_draft_tokens" in asked or "exit_layer" in asked:
        base.pop("tree", None)
    if "exit_layer" in asked and asked["exit_layer"] is None:
        base.pop("lookup", None)
    elif "exit_layer" in asked and tuned is not None and tuned.exit_layer is None:  # what is off has no length to keep
        base = {name: base[name] for name in ("num_lookup_tokens", "draft_vocabulary")}
    if asked.get("tree") is not None:
        base.pop("draft_stop", None)
    if AUTO in (asked.get("exit_layer"), asked.get("num_draft_tokens")):
        base.pop("draft_stop", None)
    setting = _combined(base, asked, num_layers(model))
    check_exit(setting, model)
    plain = setting.exit_layer is None and setting.lookup == "off"
    if plain and asked.get("tree") is not None and ("exit_layer" in asked or tuned is not None):
        warnings.warn(
            f"tree={setting.tree!r} is for an early exit to grow, and exit_layer=None is plain decoding: "
            "give exit_layer=1, 2, ... or leave tree out",
            stacklevel=_CALLER,
        )
    return setting


def _combined(tuned: dict[str, Any], asked: dict[str, Any], layers: int) -> Setting:
    values = {"exit_layer": None, "num_draft_tokens": DEFAULT_NUM_DRAFT_TOKENS, **tuned, **asked}
    try:
        return Setting(**values)
    except ValueError as error:
        blamed = _blamed(values, [name for name in _HARMLESS if name in tuned.keys() - asked.keys()])
        if not blamed:
            raise
        reason = str(error).rpartition(": ")[0]  # without its way out, which takes all for asked
        carried = " and ".join(f"{name}={values[name]!r}" for name in blamed)
        instead = {
            "tree": f"num_draft_tokens={DEFAULT_NUM_DRAFT_TOKENS}",  # which takes a tuned tree's place
            "exit_layer": f"exit_layer=1 … {layers - 1}",
            "num_draft_tokens": f"num_draft_tokens={DEFAULT_NUM_DRAFT_TOKENS}",
            "lookup": "lookup='hybrid'",
        }
        ways = " and ".join(instead[name] for name in blamed)
        raise ValueError(f"{reason}; this checkpoint is tuned to {carried}: give {ways} to override it") from None


def _blamed(values: dict[str, Any], tuned: Sequence[str]) -> tuple[str, ...]:
    """The fewest of the tuned fields without which the others go together."""
    for names in chain.from_iterable(combinations(tuned, n) for n in range(1, len(tuned) + 1)):
        try:
            Setting(**{**values, **{name: _HARMLESS[name] for name in names}})
        except ValueError:
            continue
        return names
    return ()
