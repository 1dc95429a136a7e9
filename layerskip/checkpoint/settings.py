"""How to draft: a setting, and where a checkpoint keeps the one it was tuned to.

`generation_config.json` carries {"layerskip": {"exit_layer": E, "num_draft_tokens": K}}: a key plain
transformers keeps and ignores. `config.json` has the same key for what belongs to the model: recipe, exits, adapters.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from layerskip.draft.draft_stop import KINDS
from layerskip.model.anatomy import num_layers
from layerskip.model.exit_number import check_exit_layer
from layerskip.model.tree import MAX_TREE_TOKENS, Shape, parse_shape

DEFAULT_NUM_DRAFT_TOKENS = 4
AUTO = "auto"
MAX_AUTO_TOKENS = 8  # of a chain whose length is "auto"
KEY = "layerskip"

LOOKUPS = ("off", "only", "hybrid", "branch")


@dataclass(frozen=True)
class Setting:
    """How to draft.

    Attributes:
        exit_layer: E, the layers that draft; "auto": of the exits that the checkpoint is known for, or none, what pays
            best as the run goes (see `adaptive.py`); None: no early exit, which without a lookup is plain decoding.
        num_draft_tokens: most tokens drafted a step by a chain; "auto": as many as pay in each step, 0 to 8.
        tree: shape of the candidate trees instead of a chain: "s3_k2_d6" or widths by depth, see `tree.parse_shape`.
        lookup: prompt lookup: "off"; "only"; "hybrid", where it finds nothing the early exit drafts; "branch", what it
            finds becomes one branch of the exit's tree.
        num_lookup_tokens: most tokens that a lookup drafts.
        draft_stop: when a chain ends earlier: before a token of which the exit is less sure than this; "heuristic", by
            what the last rounds accepted; "cost", where a token is not worth its time, as "auto" does too; None:
            never.
        draft_vocabulary: whether the exit's head is cut to the checkpoint's draft vocabulary, where it has one.
    """

    exit_layer: int | str | None
    num_draft_tokens: int | str
    tree: str | tuple[int, ...] | None = None
    lookup: str = "off"
    num_lookup_tokens: int = 8
    draft_stop: float | str | None = None
    draft_vocabulary: bool = True

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "num_lookup_tokens"):
            n, auto = getattr(self, name), name == "num_draft_tokens"
            if (auto and n == AUTO) or (isinstance(n, int) and not isinstance(n, bool) and n >= 0):
                continue
            raise ValueError(f"{name} must be a whole number, 0 or more{', or auto' if auto else ''}, got {n!r}")
        if isinstance(self.num_draft_tokens, int) and self.num_draft_tokens > MAX_TREE_TOKENS:
            raise ValueError(f"num_draft_tokens={self.num_draft_tokens} is more than {MAX_TREE_TOKENS}: draft fewer")
        if not isinstance(self.draft_vocabulary, bool):
            raise ValueError(f"draft_vocabulary={self.draft_vocabulary!r} is neither True nor False")
        if isinstance(self.tree, list):
            object.__setattr__(self, "tree", tuple(self.tree))
        if self.tree is not None:
            parse_shape(self.tree)
        if self.lookup not in LOOKUPS:
            raise ValueError(f"lookup={self.lookup!r} is unknown: choose one of {', '.join(LOOKUPS)}")
        if isinstance(self.draft_stop, str):
            if self.draft_stop not in KINDS:
                raise ValueError(f"draft_stop={self.draft_stop!r} is unknown: a probability, or {' or '.join(KINDS)}")
        elif self.draft_stop is not None and (
            isinstance(self.draft_stop, bool) or not isinstance(self.draft_stop, Real) or not 0 <= self.draft_stop <= 1
        ):
            raise ValueError(f"draft_stop={self.draft_stop!r} is no probability: 0 to 1, or leave it out")
        if self.draft_stop is not None and self.tree is not None:
            raise ValueError("draft_stop ends chains, and a tree is no chain: leave one of the two out")
        if self.exit_layer is None and self.lookup in ("hybrid", "branch"):
            raise ValueError(f"lookup={self.lookup!r} goes with an early exit: give exit_layer, or lookup='only'")
        self._check_auto()

    def _check_auto(self) -> None:
        if isinstance(self.exit_layer, str) and self.exit_layer != AUTO:
            raise ValueError(f"exit_layer={self.exit_layer!r} is unknown: a number of layers, 'auto', or None")
        names = [name for name in ("exit_layer", "num_draft_tokens") if getattr(self, name) == AUTO]
        if names and self.lookup == "branch":
            raise ValueError(f"{names[0]}='auto' weighs chains, which lookup='branch' makes trees of: use 'hybrid'")
        if self.exit_layer == AUTO and self.tree is not None:
            raise ValueError(
                "exit_layer='auto' weighs chains, and a tree is no chain: give a number, or leave tree out"
            )
        if names and self.tree is None and self.draft_stop not in (None, "cost"):
            raise ValueError(
                f"{names[0]}='auto' ends chains by itself, and draft_stop={self.draft_stop!r} as well: "
                "leave one of the two out"
            )

    @property
    def weighs(self) -> bool:
        """Whether drafts are weighed against their time, round by round."""
        auto = AUTO in (self.exit_layer, self.num_draft_tokens) or self.draft_stop == "cost"
        return auto and self.tree is None and self.exit_layer is not None and self.lookup != "only"

    @property
    def grows_trees(self) -> bool:
        """Whether the early exit drafts, and branches."""
        return self.exit_layer is not None and self.lookup != "only" and not self.shape.is_chain

    @property
    def shape(self) -> Shape:
        """What the early exit grows, at most."""
        if self.tree is not None:
            return parse_shape(self.tree)
        n = self.num_draft_tokens
        return Shape((1,) * (n if isinstance(n, int) else MAX_AUTO_TOKENS))


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
        known = {field.name for field in fields(Setting)}  # a newer version may store more
        setting = Setting(**{"exit_layer": None, **{name: stored[name] for name in known & stored.keys()}})
        check_exit(setting, model)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"generation_config.{KEY} is {stored!r}, which does not fit this model ({error}): "
            "give exit_layer and num_draft_tokens, or mend generation_config.json"
        ) from error
    return setting


def store_setting(model: PreTrainedModel, setting: Setting) -> None:
    """Put `setting` where `save_pretrained` writes it and `generate` finds it."""
    check_exit(setting, model)
    usual = {field.name: field.default for field in fields(Setting)}
    setattr(model.generation_config, KEY, {k: v for k, v in asdict(setting).items() if v != usual[k]})
    # A generation config marked as derived from the model's config is derived anew on loading, without the key.
    model.generation_config._from_model_config = False


def check_exit(setting: Setting, model: PreTrainedModel) -> None:
    """Raise `ValueError` unless the model has the layers that draft, and one more."""
    if setting.exit_layer is not None and not isinstance(setting.exit_layer, str):
        check_exit_layer(setting.exit_layer, num_layers(model))
