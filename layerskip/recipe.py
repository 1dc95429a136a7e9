"""The recipe: every choice of LayerSkip training, frozen, and prepare(), which hangs it on a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from layerskip.handle import Handle

CHOICES = {
    "dropout_depth": ("exponential", "linear"),
    "dropout_time": ("constant", "rising", "falling"),
    "exit_weights": ("paper", "uniform"),
    "curriculum": ("rotational", "gradual", "all"),
}


@dataclass(frozen=True)
class Recipe:
    """How layers are dropped and exits are trained. Symbols as in Elhoushi et al. 2024 (arXiv 2404.16710), 4.1.

    Exits are counted in layers run: exit 2 is the output of the paper's layer l = 1, exit L is the model itself.
    """

    max_dropout: float = 0.1  # p_max, the rate at the last layer
    dropout_depth: str = "exponential"  # D(l): 2^(l/(L-1)) - 1 (paper), or linear: l/(L-1)
    dropout_time: str = "constant"  # S(t): 1, rising: 2^(t/(T-1)) - 1 (paper, from scratch), falling: 1 - t/(T-1)
    exit_loss_scale: float = 0.2  # e_scale: how much early exits weigh against the last layer
    exit_weights: str = "paper"  # e(l): grows with depth (paper); uniform: exit_loss_scale each, 1 for the last
    exits: tuple[int, ...] | None = None  # early exits that are trained, 1 .. L-1; None: all
    curriculum: str = "rotational"  # C(t,l): which of them at a step: every R-th in turn, gradual, or all
    curriculum_stride: int = 8  # R, rotational only
    include_last: bool = True  # the last layer is in the loss at every step, whatever the curriculum says
    self_distillation: float = 0.0  # share of an exit's loss that is cross-entropy to the last layer's own output
    total_steps: int | None = None  # T, optimizer steps; needed by rising, falling and gradual
    seed: int = 0  # of the dropout decisions

    def __post_init__(self) -> None:
        if self.exits is not None:
            object.__setattr__(self, "exits", tuple(sorted(set(self.exits))))
            if not self.exits:
                raise ValueError("exits is empty: name at least one early exit, or leave it out for all")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(choices)}")
        for name, high in (("max_dropout", 1.0), ("exit_loss_scale", None), ("self_distillation", 1.0)):
            value = getattr(self, name)
            if not (value >= 0 and (high is None or value <= high)):
                raise ValueError(f"{name}={value} is out of range: 0 {'or more' if high is None else f'to {high:g}'}")
        if self.curriculum_stride < 1:
            raise ValueError(f"curriculum_stride={self.curriculum_stride} is out of range: 1 or more")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} is out of range: 1 or more")

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless the recipe fits a model of `num_layers` layers and is complete."""
        for exit_layer in self.exits or ():
            if not 1 <= exit_layer < num_layers:
                raise ValueError(
                    f"exits has {exit_layer}, but this model has {num_layers} layers: choose from 1 to {num_layers - 1}"
                )
        needs_total = self.dropout_time != "constant" or self.curriculum == "gradual"
        if needs_total and self.total_steps is None:
            raise ValueError(
                f"dropout_time={self.dropout_time}, curriculum={self.curriculum} depend on the length of the run: "
                "give total_steps"
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


def prepare(model: nn.Module, recipe: Recipe) -> Handle:
    """Hang `recipe` on `model`: from now on `model(input_ids, labels=labels).loss` is the LayerSkip loss.

    Works in any loop (ours, transformers' Trainer, TRL's), since it is hooks on the layers and the model's own
    loss function; parameters, their names and evaluation mode are left as they were. The recipe is written into
    `model.config`, so that every later `save_pretrained` carries it.

    Returns:
        A handle that is told the step (`set_step`), answers what is active, and takes it all off (`remove`).

    Raises:
        ValueError: if the recipe does not fit the model.
        UnsupportedModelError: if the model's layers cannot be found.
    """
    from layerskip.handle import Handle

    return Handle(model, recipe)
