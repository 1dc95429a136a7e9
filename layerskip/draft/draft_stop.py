"""When a chain of drafts ends: by rule, decided before a token is drawn.

What may be looked at is what was committed in earlier rounds and the draft's distribution at the position in question,
never a token that was drawn and would be left out: that would bias the output (see `acceptance.py`, condition C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from layerskip.decode.step import Step

KINDS = ("heuristic", "cost")


class DraftStop:
    """The longest chain always, or up to the first token of which the exit is less sure than `threshold`.

    In every round it is asked to `begin`, before each token whether that `goes_on` (where it `asks` at all), and told
    when the round is `drafted` and when it is at its `end`.

    Args:
        most: tokens of the longest chain.
    """

    def __init__(self, most: int, threshold: float | None = None) -> None:
        self.most, self.threshold = most, threshold

    @property
    def exit_layer(self) -> int | None:
        """The exit that drafts in this round, where it is not always the same."""
        return None

    def begin(self) -> int:
        """Most tokens to draft in the round that begins."""
        return self.most

    @property
    def asks(self) -> bool:
        """Whether `goes_on` is worth asking: it costs a look at the distribution."""
        return self.threshold is not None

    def goes_on(self, scores: Tensor) -> Tensor:
        """(B,) bool: for which rows the token after these (B, 1, vocab) scores is worth drafting."""
        return confidence(scores) >= (self.threshold or 0.0)

    def drafted(self) -> None:
        """The draft is done, or there is none."""

    def end(self, steps: Sequence[Step]) -> None:
        """The round brought these steps, one for each row."""


class Heuristic(DraftStop):
    """Two tokens more after a round in which every row accepted all, one less after any other; as transformers does."""

    def __init__(self, most: int, start: int = 4) -> None:
        super().__init__(most)
        self._now = min(start, most)

    def begin(self) -> int:
        return self._now

    def end(self, steps: Sequence[Step]) -> None:
        if not any(step.num_drafted for step in steps):
            return
        whole = all(step.num_accepted == step.num_drafted for step in steps)
        self._now = min(self._now + 2, self.most) if whole else max(self._now - 1, 1)


def confidence(scores: Tensor) -> Tensor:
    """(B,) probability of the most probable token, 0 where nothing may follow; scores (B, 1, vocab)."""
    return scores[:, 0].softmax(dim=-1).amax(dim=-1).nan_to_num(0.0)


def draft_stop_for(draft_stop: float | str | None, most: int) -> DraftStop:
    """The stop that a setting asks for, but for "cost", which takes more to make: see `adaptive.adaptive_for`."""
    if draft_stop == "heuristic":
        return Heuristic(most)
    assert not isinstance(draft_stop, str)
    return DraftStop(most, draft_stop)
