"""What a run of steps adds up to, in the field's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerskip.decode.step import Step


@dataclass
class Statistics:
    """Sums over decoding steps. Rates are nan where nothing was counted.

    Attributes:
        num_steps: verify passes.
        num_tokens: committed tokens.
        num_drafted: proposed tokens.
        num_accepted: proposed tokens that the rule accepted.
        drafted_at: drafted_at[i], steps that proposed a token at draft position i.
        accepted_at: accepted_at[i], steps that accepted the token at draft position i.
        reached_at: reached_at[i], steps that proposed a token at draft position i and accepted all before it.
        draft_seconds, verify_seconds, rollback_seconds: host time of the three parts of all steps.
        first_step_seconds: of these, the first step's; of several runs, their sum.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rollback_seconds: float = 0.0
    first_step_seconds: float = 0.0

    def add(self, step: Step) -> None:
        if self.num_steps == 0:
            self.first_step_seconds = step.draft_seconds + step.verify_seconds + step.rollback_seconds
        self.num_steps += 1
        self.num_tokens += step.tokens.numel()
        self.num_drafted += step.num_drafted
        self.num_accepted += step.num_accepted
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.rollback_seconds += step.rollback_seconds
        _count_prefix(self.drafted_at, step.num_levels)
        _count_prefix(self.accepted_at, step.num_accepted)
        _count_prefix(self.reached_at, min(step.num_levels, step.num_accepted + 1))

    def merge(self, other: Statistics) -> None:
        """Add another run's sums to this one's."""
        for name in ("num_steps", "num_tokens", "num_drafted", "num_accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("draft_seconds", "verify_seconds", "rollback_seconds", "first_step_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_at", "accepted_at", "reached_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per verify step, bonus included; plain decoding has 1."""
        return self.num_tokens / self.num_steps if self.num_steps else float("nan")

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted / self.num_drafted if self.num_drafted else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each draft position, the share of steps with a proposal there that accepted it."""
        return [a / d for a, d in zip(_padded(self.accepted_at, len(self.drafted_at)), self.drafted_at, strict=True)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each draft position that was reached, the share of steps that accepted it, of those that proposed a token
        there and accepted all before it."""
        return [a / r for a, r in zip(_padded(self.accepted_at, len(self.reached_at)), self.reached_at, strict=True)]

    @property
    def acceptance_histogram(self) -> list[int]:
        """acceptance_histogram[n], steps that accepted exactly n tokens; one entry more than `drafted_at`."""
        at_least = [self.num_steps, *_padded(self.accepted_at, len(self.drafted_at)), 0]
        return [more - fewer for more, fewer in pairwise(at_least)]


def _padded(counts: list[int], n: int) -> list[int]:
    return counts + [0] * (n - len(counts))


def _count_prefix(counts: list[int], n: int) -> None:
    counts.extend([0] * (n - len(counts)))
    for position in range(n):
        counts[position] += 1
