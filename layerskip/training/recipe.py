"""The recipe: every choice of LayerSkip training, frozen, and prepare(), which hangs it on a model."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from layerskip.training.presets import PRESETS, preset_values

if TYPE_CHECKING:
    from torch import nn

    from layerskip.training.handle import Handle

CHOICES = {
    "dropout_depth": ("exponential", "linear"),
    "dropout_time": ("constant", "rising", "falling"),
    "dropout_per": ("sample", "batch"),
    "exit_weights": ("paper", "uniform", "shallow"),
    "curriculum": ("rotational", "gradual", "all"),
}
# name -> (lowest value, may it be that, highest value)
_RANGES: dict[str, tuple[float, bool, float]] = {
    "max_dropout": (0, True, 1.0),
    "exit_loss_scale": (0, True, 1000.0),
    "exit_loss_positions": (0, False, 1.0),
    "self_distillation": (0, True, 1.0),
    "distillation_temperature": (0.01, True, 100.0),  # logits are divided by it, the loss multiplied by its square
    "reference_weight": (0, True, 1000.0),
}
_COUNTS = ("curriculum_stride", "total_steps", "adapter_rank", "adapter_blocks")


@dataclass(frozen=True)
class Recipe:
    """How layers are dropped and exits are trained. Symbols as in Elhoushi et al. 2024 (arXiv 2404.16710), 4.1.

    Exits are counted in layers run: exit 2 is the output of the paper's layer l = 1, exit L is the model itself.
    The defaults are what won `scripts/ablation.py` (README, "Which recipe"): two shallow exits in turn, half of their
    loss from the model's own output. `Recipe.preset(name)` gives the paper's and others' choices by name.
    """

    max_dropout: float = 0.1  # p_max, the rate at the last layer
    dropout_depth: str = "exponential"  # D(l): 2^(l/(L-1)) - 1 (paper), or linear: l/(L-1)
    dropout_time: str = "constant"  # S(t): 1, rising: 2^(t/(T-1)) - 1 (paper, from scratch), falling: 1 - t/(T-1)
    dropout_per: str = "sample"  # each sample draws for itself (paper), or all of a step's at once: batch
    dropout_rescale: bool = False  # a kept layer's contribution is divided by its keep rate (2609.05275)
    exit_loss_scale: float = 0.5  # e_scale: how much early exits weigh against the last layer
    exit_weights: str = "shallow"  # e(l): falls with depth; uniform: e_scale each; paper: grows with depth
    exits: tuple[int, ...] | None = None  # early exits that are trained; None: all, or for shallow two near the top
    exit_loss_positions: float = 0.25  # share of the positions an exit learns from, drawn anew each step (unbiased)
    curriculum: str = "rotational"  # C(t,l): which of them at a step: every R-th in turn, gradual, or all
    curriculum_stride: int | None = 2  # R, rotational only, at most the exits there are; None: L - 1 (paper, scratch)
    include_last: bool = True  # the last layer is in the loss at every step, whatever the curriculum says
    self_distillation: float = 0.5  # share of an exit's loss that is cross-entropy to the last layer's own output
    distillation_temperature: float = 1.0  # softens both sides of it; the gradient keeps its size
    reference_weight: float = 0.0  # weight of KL(original model || last layer), which guards the model's quality
    adapter_rank: int | None = None  # each exit drafts through a low-rank adapter of this rank; None: none
    adapter_blocks: int | None = None  # or through so many decoder layers of its own, at first copies of those after it
    freeze_model: bool = False  # train nothing but those adapters: the model itself stays bit for bit what it was
    total_steps: int | None = None  # T, optimizer steps; needed by rising, falling and gradual
    seed: int = 0  # of the dropout decisions and of the positions

    def __post_init__(self) -> None:
        self._check_types()
        if self.exits is not None:
            object.__setattr__(self, "exits", tuple(sorted(set(self.exits))))
            if not self.exits:
                raise ValueError("exits is empty: name at least one early exit, or leave it out for all")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(choices)}")
        for name, (low, inclusive, high) in _RANGES.items():
            value = getattr(self, name)
            if not ((value >= low if inclusive else value > low) and value <= high):
                least = f"{low:g}" if inclusive else f"above {low:g}"
                raise ValueError(f"{name}={value} is out of range: {least} to {high:g}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is out of range: 1 or more")
        if self.adapter_blocks is not None and self.adapter_rank is not None:
            raise ValueError(
                f"adapter_blocks={self.adapter_blocks} and adapter_rank={self.adapter_rank} are two kinds of adapter: "
                "set one of them to null"
            )
        if self.freeze_model and not self.has_adapters:
            raise ValueError(
                "freeze_model leaves only adapters to train: give adapter_blocks, for example 1, or adapter_rank"
            )
        if self.freeze_model and (self.max_dropout or self.reference_weight):
            raise ValueError(
                "freeze_model leaves nothing to drop or to guard: set max_dropout=0 "
                f"(now {self.max_dropout:g}) and reference_weight=0 (now {self.reference_weight:g})"
            )

    def _check_types(self) -> None:
        """A fraction or a text would be taken for a number until it fails, or trains nothing, much later."""
        for name in _RANGES:
            if not isinstance(value := getattr(self, name), int | float) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is not a number")
        for name in _COUNTS:
            if not isinstance(value := getattr(self, name), int | None):
                raise ValueError(f"{name}={value!r} is not a whole number")
        for name in ("dropout_rescale", "include_last", "freeze_model"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r} is neither True nor False")
        if self.exits is None:
            return
        if not isinstance(self.exits, Collection) or not all(type(e) is int for e in self.exits):
            raise ValueError(f"exits={self.exits!r} is no list of whole numbers: write it as (1, 2)")

    @property
    def has_adapters(self) -> bool:
        """Whether exits draft through adapters, of either kind."""
        return (self.adapter_rank, self.adapter_blocks) != (None, None)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Recipe:
        """The recipe `name` of `layerskip.training.presets`, with `changes` on top.

        Raises:
            ValueError: if there is none of that name.
        """
        if name not in PRESETS:
            raise ValueError(f"preset={name!r} is unknown: choose one of {', '.join(PRESETS)}")
        return cls(**preset_values(name, changes))

    def trained_exits(self, num_layers: int) -> tuple[int, ...]:
        """Early exits that this recipe trains in a model of `num_layers` layers, ascending."""
        if self.exits is not None:
            return self.exits
        if self.exit_weights == "shallow":  # where the speed is: drafts of a twelfth and an eighth of the model
            return tuple(sorted({min(math.ceil(num_layers / share), num_layers - 1) for share in (12, 8)}))
        return tuple(range(1, num_layers))

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless the recipe fits a model of `num_layers` layers and is complete."""
        if num_layers < 2:
            raise ValueError(f"this model has {num_layers} layer: none can draft for the rest, it takes 2 or more")
        for exit_layer in self.exits or ():
            if not 1 <= exit_layer < num_layers:
                raise ValueError(
                    f"exits has {exit_layer}, but this model has {num_layers} layers: choose from 1 to {num_layers - 1}"
                )
        self._check_weights(num_layers)
        last = max(self.trained_exits(num_layers))
        if self.adapter_blocks is not None and last + self.adapter_blocks > num_layers:
            raise ValueError(
                f"adapter_blocks={self.adapter_blocks} are copies of the layers after exit {last}, of which this model "
                f"has {num_layers - last}: take fewer, or an earlier exit"
            )
        needs_total = self.dropout_time != "constant" or self.curriculum == "gradual"
        if needs_total and self.total_steps is None:
            raise ValueError(
                f"dropout_time={self.dropout_time}, curriculum={self.curriculum} depend on the length of the run: "
                "give total_steps"
            )

    def _check_weights(self, num_layers: int) -> None:
        """Raise ValueError where what was asked to learn never weighs anything."""
        exits = self.trained_exits(num_layers)
        if self.has_adapters and not self.freeze_model and self.exit_loss_scale == 0:
            raise ValueError("exit_loss_scale=0 lets the exits' adapters learn nothing: give it, or leave them out")
        alone = self.exits == (1,) and self.exit_loss_scale > 0
        asked = 1 in exits and (self.has_adapters or alone)
        if self.exit_weights == "paper" and asked and not (self.freeze_model and len(exits) == 1):
            raise ValueError(
                "exit_weights=paper gives exit 1 no weight (e(0) = 0), so nothing would learn there: take another, or "
                "exit_weights=uniform"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `Recipe.from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Read what `to_dict` gave; keys of a newer version are ignored."""
        known = {field.name for field in fields(cls)}
        kept = {name: value for name, value in data.items() if name in known}
        if kept.get("exits") is not None:
            kept["exits"] = tuple(kept["exits"])
        return cls(**kept)


def prepare(model: nn.Module, recipe: Recipe, reference: nn.Module | None = None) -> Handle:
    """Hang `recipe` on `model`: from now on `model(input_ids, labels=labels).loss` is the LayerSkip loss.

    Works in any loop (ours, transformers' Trainer, TRL's), since it is hooks on the layers and the model's own
    loss function; parameters, their names and evaluation mode are left as they were. The recipe is written into
    `model.config`, so that every later `save_pretrained` carries it.

    Args:
        reference: the original that `reference_weight` holds the last layer to, where `model` has moved on from it
            already (a resume); None: a copy of `model` as it is now.

    Returns:
        A handle that is told the step (`set_step`), answers what is active, and takes it all off (`remove`).

    Raises:
        ValueError: if the recipe does not fit the model.
        UnsupportedModelError: if the model's layers cannot be found.
    """
    from layerskip.training.handle import Handle

    return Handle(model, recipe, reference)
