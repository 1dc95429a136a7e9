"""Which exit layer and draft length a call uses, and where a checkpoint keeps its tuned ones.

`generation_config.json` carries {"layerskip": {"exit_layer": E, "num_draft_tokens": K}}: a key plain
transformers keeps and ignores. `config.json` has the same key for what belongs to the model: recipe, exits, adapters.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.anatomy import check_exit_layer, num_layers

DEFAULT_NUM_DRAFT_TOKENS = 4
KEY = "layerskip"


@dataclass(frozen=True)
class Setting:
    """How to decode: `exit_layer` layers draft up to `num_draft_tokens` tokens a step; None is plain decoding."""

    exit_layer: int | None
    num_draft_tokens: int

    def __post_init__(self) -> None:
        n = self.num_draft_tokens
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"num_draft_tokens must be a whole number, 0 or more, got {n!r}")


def carried(config: PreTrainedConfig) -> dict[str, Any]:
    """What the model's config carries under our key: a copy, empty if there is nothing."""
    return dict(getattr(config, KEY, None) or {})


def carry(config: PreTrainedConfig, **values: Any) -> None:
    """Put `values` beside what the config carries already; None takes one out."""
    merged = {**carried(config), **values}
    setattr(config, KEY, {name: value for name, value in merged.items() if value is not None})


def tuned_setting(model: PreTrainedModel) -> Setting | None:
    """The setting the checkpoint carries, or None.

    Raises:
        ValueError: if what it carries does not fit the model.
    """
    stored: Any = getattr(model.generation_config, KEY, None)
    if not stored:
        return None
    try:
        setting = Setting(stored["exit_layer"], stored["num_draft_tokens"])
        if setting.exit_layer is not None:
            check_exit_layer(setting.exit_layer, num_layers(model))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"generation_config.{KEY} is {stored!r}, which does not fit this model ({error}): "
            "give exit_layer and num_draft_tokens, or mend generation_config.json"
        ) from error
    return setting


def store_setting(model: PreTrainedModel, setting: Setting) -> None:
    """Put `setting` where `save_pretrained` writes it and `generate` finds it."""
    if setting.exit_layer is not None:
        check_exit_layer(setting.exit_layer, num_layers(model))
    setattr(model.generation_config, KEY, asdict(setting))
    # A generation config marked as derived from the model's config is derived anew on loading, without the key.
    model.generation_config._from_model_config = False


def resolve_setting(
    model: PreTrainedModel,
    exit_layer: int | Literal["tuned"] | None,
    num_draft_tokens: int | Literal["tuned"],
) -> Setting:
    """What a call asks for, completed by what the checkpoint carries.

    Raises:
        ValueError: if either is out of range.
    """
    tuned = tuned_setting(model) if "tuned" in (exit_layer, num_draft_tokens) else None
    if exit_layer == "tuned":
        if tuned is None:
            warnings.warn(
                "this checkpoint carries no tuned exit layer, so it is decoded plainly: "
                f"give exit_layer=1 … {num_layers(model) - 1}, or exit_layer=None to say so",
                stacklevel=4,
            )
        exit_layer = tuned.exit_layer if tuned else None
    if num_draft_tokens == "tuned":
        num_draft_tokens = tuned.num_draft_tokens if tuned else DEFAULT_NUM_DRAFT_TOKENS
    if exit_layer is not None:
        check_exit_layer(exit_layer, num_layers(model))
    return Setting(exit_layer, num_draft_tokens)
