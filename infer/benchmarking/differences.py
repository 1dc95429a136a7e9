"""Where two greedy outputs part, and whether that is rounding or a fault."""

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from layerskip.model.anatomy import anatomy

# A near-tie may be this many times as wide as the model's own rounding at the place, and this many units in
# the last place of the best logit where that rounding happens to be none.
_SLACK = 4


@dataclass(frozen=True)
class Difference:
    """The first token at which an output is not the baseline's.

    Attributes:
        position: index among the new tokens.
        expected: the baseline's token id; None where it had ended.
        actual: the output's token id; None where it had ended.
        margin: logit of the best token minus that of the second best, given the baseline's tokens before.
        gap: logit of the best token minus the lower one of the two tokens that were chosen.
        rounding: largest change of any logit here when the same tokens pass the model in other chunks.
        near_tie: whether rounding explains the difference; if not, something is wrong.
    """

    position: int
    expected: int | None
    actual: int | None
    margin: float
    gap: float
    rounding: float
    near_tie: bool

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def first_difference(
    model: PreTrainedModel, prompt: Tensor, expected: list[int], actual: list[int]
) -> Difference | None:
    """Compare two greedy outputs of a (1, length) prompt; None if they are equal."""
    for position, (wanted, got) in enumerate(zip_longest(expected, actual)):
        if wanted != got:
            common = torch.tensor([expected[:position]], dtype=prompt.dtype, device=prompt.device)
            return _explain(model, torch.cat([prompt, common], dim=1), position, wanted, got)
    return None


def _explain(
    model: PreTrainedModel, prefix: Tensor, position: int, expected: int | None, actual: int | None
) -> Difference:
    logits, rounding = _logits_and_rounding(model, prefix)
    best, second = logits.topk(2).values.tolist()
    chosen = [token for token in (expected, actual) if token is not None]
    gap = best - min(logits[token].item() for token in chosen)
    unit = abs(best) * torch.finfo(model.dtype).eps
    # An output that merely ends early or late is a fault whatever the logits are.
    near_tie = len(chosen) == 2 and gap <= _SLACK * max(rounding, unit)
    return Difference(position, expected, actual, best - second, gap, rounding, near_tie)


@torch.no_grad()
def _logits_and_rounding(model: PreTrainedModel, prefix: Tensor) -> tuple[Tensor, float]:
    """Logits (vocab,) after a (1, length) prefix, and how much they depend on how it is cut: all at once, or
    the last token alone, as plain decoding does."""
    whole = model(input_ids=prefix, use_cache=False).logits[0, -1].float()
    if prefix.shape[1] == 1:
        return whole, 0.0
    cache = {anatomy(model).cache_argument: DynamicCache(config=model.config)}
    model(input_ids=prefix[:, :-1], use_cache=True, **cache)
    last = model(input_ids=prefix[:, -1:], use_cache=True, **cache).logits[0, -1].float()
    return whole, (whole - last).abs().max().item()
