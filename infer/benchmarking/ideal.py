"""What drafts of an early exit could bring at the acceptance that was measured: a round's cost, on paper and here."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from infer.benchmarking.arms import Arm
from infer.loading import Loaded
from layerskip.checkpoint.vocabulary import draft_vocabulary_of
from layerskip.forecast import Costs, measure_bookkeeping, measure_costs, paper_costs


@dataclass(frozen=True)
class CostModel:
    """Costs of the exits that arms draft with.

    Attributes:
        here: seconds of the stages, timed alone on this machine, and of the loop around them.
        paper: weights read.
        cut: whether the checkpoint has a draft vocabulary.
    """

    here: Costs
    paper: Costs
    cut: bool

    def record(self) -> dict[str, Any]:
        """For JSON: seconds and weights by exit layer."""
        return {"seconds": asdict(self.here), "weights_read": asdict(self.paper)}

    def ideal(self, arm: Arm, record: dict[str, Any]) -> dict[str, float] | None:
        """Speedups over plain decoding in the same loop at the record's mean acceptance length and mean draft length,
        where the arm drafts chains of an early exit: by the stages' seconds, and by the weights that are read."""
        length, drafted = record.get("mean_acceptance_length"), record.get("drafted_per_step")
        if not is_chain(arm) or length is None or drafted is None:
            return None
        assert arm.setting is not None
        exit_layer, cut = arm.setting.exit_layer, self.cut and arm.setting.draft_vocabulary
        return {
            name: round(length * costs.step / _round(costs, exit_layer, drafted, cut), 4)
            for name, costs in (("stage_seconds", self.here), ("weights_read", self.paper))
        }


def is_chain(arm: Arm) -> bool:
    """Whether an arm is what the cost model describes: this kit's chains of an early exit, alone."""
    setting = arm.setting
    if setting is None or arm.second_cache or setting.tree is not None or setting.lookup != "off":
        return False
    return isinstance(setting.exit_layer, int) and isinstance(setting.num_draft_tokens, int)


def cost_model(
    loaded: Loaded, arms: Sequence[Arm], prompts: Sequence[Tensor], arguments: dict[str, Any]
) -> CostModel | None:
    """Time the stages of the arms' exits, in the middle of an output of (1, length) prompts; None where no arm drafts
    a chain of an early exit."""
    settings = [arm.setting for arm in arms if is_chain(arm) and arm.setting is not None]
    if not settings:
        return None
    exits: list[Any] = sorted({setting.exit_layer for setting in settings})  # whole numbers: see is_chain
    lengths: list[Any] = [setting.num_draft_tokens for setting in settings]
    longest = max(2, *lengths)
    context = sum(prompt.shape[1] for prompt in prompts) // len(prompts) + arguments["max_new_tokens"] // 2
    vocabulary = draft_vocabulary_of(loaded.model)
    costs = measure_costs(loaded.model, exits, longest, context, draft_vocabulary=vocabulary)
    bookkeeping = measure_bookkeeping(loaded.model, longest, **arguments)
    paper = paper_costs(loaded.model, exits, vocabulary)
    return CostModel(replace(costs, bookkeeping=bookkeeping), paper, vocabulary is not None)


def _round(costs: Costs, exit_layer: Any, drafted: float, cut: bool) -> float:
    """A round of so many drafted tokens on average: between two whole numbers the costs are linear."""
    low = math.floor(drafted)
    part = drafted - low
    return (1 - part) * costs.round(exit_layer, low, cut) + part * costs.round(exit_layer, low + 1, cut)
