"""When a chain of drafts ends: by rule, decided before a token is drawn.

What may be looked at is what was committed in earlier rounds and the draft's distribution at the position in question,
never a token that was drawn and would be left out: that would bias the output (see `acceptance.py`, condition C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from layerskip.decoding import Step

KINDS = ("heuristic", "cost")


class DraftStop:
    """The longest chain always, or up to the first token of which the exit is less sure than `threshold`.

    Args:
        most: tokens of the longest chain.
    """

    def __init__(self, most: int, threshold: float | None = None) -> None:
        self.most, self.threshold = most, threshold

    def begin(self) -> int:
        """Most tokens to draft in the round that begins."""
        return self.most

    @property
    def asks(self) -> bool:
        """Whether `goes_on` is to be asked at all."""
        return self.threshold is not None

    def goes_on(self, scores: Tensor) -> Tensor:
        """(B,) bool: for which rows the token after these (B, 1, vocab) scores is worth drafting."""
        return confidence(scores) >= (self.threshold or 0.0)

    def end(self, steps: Sequence[Step]) -> None:
        """The round brought this."""


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


class CostAware(DraftStop):
    """As long as the next token is expected to bring more than its time would bring elsewhere.

    With the chance P that all drafted so far is accepted and the chance a of the next one, drafting it brings P·a
    tokens and costs the time d of a draft step; the run as it goes brings r tokens a second. It is worth it while
    P·a > r·d. d and r are running means over the rounds so far; a is what exits of this confidence turned out to be
    accepted (running means too, by tenths of confidence, starting from the confidence itself). Where rounds without
    any draft bring more tokens a second, there is no draft, but for one round in 32 that looks again.

    Lengths then depend on the clock: seeds of the rules "rejection" and "block" no longer reproduce a text, while
    greedy and coupled output, and every distribution, stay what they are.
    """

    PRIOR = 4.0  # observations that the confidence itself counts for
    LOOK = 32  # rounds; the first time without a draft comes earlier

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._draft_time = Ratio()  # seconds a draft step
        self._rate, self._plain_rate = Ratio(), Ratio()  # tokens a second of rounds with, and without a draft
        self._count = 0
        tenths = torch.linspace(0.05, 0.95, 10)
        self._accepted, self._seen = tenths * self.PRIOR, torch.full((10,), self.PRIOR)
        self._round: list[Tensor] = []  # (B,) tenth of confidence of each token drafted this round
        self._reach: Tensor | float = 1.0  # (B,) P

    @property
    def asks(self) -> bool:
        return True

    def begin(self) -> int:
        self._round, self._reach = [], 1.0
        self._count += 1
        if self._plain_rate.value == 0:
            return 0 if self._count == self.LOOK // 4 else self.most
        pays = self._rate.value > self._plain_rate.value
        looks = self._count % self.LOOK == 0
        return self.most if pays != looks else 0

    def goes_on(self, scores: Tensor) -> Tensor:
        tenth = (confidence(scores) * 10).long().clamp(max=9).cpu()  # (B,)
        self._reach = self._reach * (self._accepted / self._seen)[tenth]  # (B,)
        self._round.append(tenth)
        # The first token of the first rounds is always drafted: nothing was measured yet.
        return (self._reach > self._rate.value * self._draft_time.value).to(scores.device)

    def end(self, steps: Sequence[Step]) -> None:
        drafted = max((step.num_drafted for step in steps), default=0)
        draft = sum(step.draft_seconds for step in steps)
        total = draft + sum(step.verify_seconds + step.rollback_seconds for step in steps)
        tokens = sum(step.tokens.shape[1] for step in steps) / len(steps)
        if not self._round:
            self._plain_rate.add(tokens, total)
            return
        self._rate.add(tokens, total)
        # One pass more than tokens: the last one's hidden state is needed, or the stop took a pass to see.
        self._draft_time.add(draft, drafted + 1)
        for row, step in enumerate(steps):
            for position in range(min(step.num_accepted + 1, step.num_drafted, len(self._round))):
                tenth = int(self._round[position][row])
                self._seen[tenth] += 1
                self._accepted[tenth] += position < step.num_accepted


class Ratio:
    """A ratio of two sums that forget slowly; 0 before anything was added."""

    MEMORY = 0.95

    def __init__(self) -> None:
        self._above, self._below = 0.0, 0.0

    def add(self, above: float, below: float) -> None:
        self._above = self.MEMORY * self._above + above
        self._below = self.MEMORY * self._below + below

    @property
    def value(self) -> float:
        return self._above / self._below if self._below else 0.0


def confidence(scores: Tensor) -> Tensor:
    """(B,) probability of the most probable token; scores (B, 1, vocab)."""
    return scores[:, 0].softmax(dim=-1).amax(dim=-1)


def draft_stop_for(draft_stop: float | str | None, most: int) -> DraftStop:
    """The stop that a setting asks for."""
    if draft_stop == "heuristic":
        return Heuristic(most)
    if draft_stop == "cost":
        return CostAware(most)
    assert not isinstance(draft_stop, str)
    return DraftStop(most, draft_stop)
