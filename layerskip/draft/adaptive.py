"""What to draft in a round, by what the rounds before brought and in what time: how long, from which exit, or nothing.

A round of exit E that drafts N tokens brings 1 + a_1 + a_1 a_2 + ... tokens and takes the time of its passes. Both are
known from the run itself: the acceptance a_i of each position by running means that forget slowly and start from what
the checkpoint says of its exits, the times by a `RoundTimes`. What promises most tokens a second is done. What could do
better if it were a little luckier than it seems is tried, the less often the more often it was tried in vain.

Within a round a token is drafted while the chance that it stays is worth more than the time it takes: while

    P c > r (d + v)

with P the chance that all before it stay, c that it does (running means by tenths of the exit's confidence), d and v
the time it adds to draft and verification, and r the tokens a second that the run can have otherwise. In a batch the
rows' chances are averaged: they share the time.

All of this looks at rounds that are over and at the draft's distribution before a token is drawn, so the output stays
exact (see `acceptance.py`, condition C). It also looks at the clock: with the rules "rejection" and "block" a seed no
longer gives the same text twice, though of the same distribution; greedy and coupled output stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from time import thread_time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from layerskip.draft.draft_stop import DraftStop, confidence
from layerskip.draft.prospect import Prospect
from layerskip.draft.round_times import RoundTimes

if TYPE_CHECKING:
    from layerskip.decode.step import Step

LUCK = 0.7  # how much better than it seems an exit may be, in shares of what is missing to 1, over sqrt(observations)
DOUBT = {False: 1.25, True: 1.05}  # the same of plain rounds, which were timed (True) or not
FIRST_WAIT, MOST_WAIT = 2, 64  # rounds between two trials of what does not pay, twice as many after each


class Plan(NamedTuple):
    """What a round may do.

    Attributes:
        rate: tokens a second that it promises.
        length: most tokens drafted.
        prospect: the exit that drafts; None: no draft.
    """

    rate: float
    length: int
    prospect: Prospect | None


class Adaptive(DraftStop):
    """Weighs every round's draft against its time.

    Args:
        most: tokens of the longest chain.
        prospects: the exits to choose from.
        times: of the parts of a round.
        processor: time rounds by this thread's processor time instead of the steps' seconds: see
            `machine.thread_clock_serves`.
    """

    def __init__(self, most: int, prospects: Sequence[Prospect], times: RoundTimes, processor: bool = False) -> None:
        super().__init__(most)
        self.prospects, self.times, self._processor = list(prospects), times, processor
        self._began = self._drafted = 0.0  # processor seconds
        self._since, self._wait = 0, FIRST_WAIT  # rounds since the last trial, and how many there must be
        self._now: Prospect | None = None  # what drafts in this round
        self._tried = False  # whether it does so to be tried
        self._rate = 0.0  # r
        self._length = 0  # of the longest chain in this round
        self._batch = 0
        self._begin_chain()

    @property
    def asks(self) -> bool:
        return True

    @property
    def exit_layer(self) -> int | None:
        return None if self._now is None else self._now.exit_layer

    def _begin_chain(self) -> None:
        self._tenths: list[list[int]] = []  # of each position looked at: of each row
        self._reach: list[float] = []  # P of each row
        self._ended = False

    def begin(self) -> int:
        self._began = thread_time()
        self._begin_chain()
        plain = Plan(1 / self.times.plain, 0, None)
        plans = [Plan(*prospect.plan(self.times), prospect) for prospect in self.prospects]
        chosen = max([plain, *plans], key=lambda plan: plan.rate)
        self._rate, self._tried = chosen.rate, False
        self._since += 1
        if self._since >= self._wait:
            other = self._most_hopeful([plan for plan in [*plans, plain] if plan is not chosen])
            if other is not None:
                # What seems worse than no draft at all is tried by a single token.
                chosen = other if other.rate >= plain.rate else other._replace(length=1)
                self._tried, self._since = True, 0
                self._wait = min(2 * self._wait, MOST_WAIT)
        self._now, self._length = chosen.prospect, chosen.length
        return self._length

    def _most_hopeful(self, plans: Sequence[Plan]) -> Plan | None:
        """The plan that promises most if it is a little luckier than it seems, where that is more than the best one."""

        def hope(plan: Plan) -> float:
            if plan.prospect is None:
                return plan.rate * DOUBT[self.times.knows_plain]
            return plan.prospect.plan(self.times, LUCK)[0]

        best = max(((hope(plan), plan) for plan in plans), key=lambda pair: pair[0], default=None)
        return best[1] if best is not None and best[0] > self._rate else None

    def goes_on(self, scores: Tensor) -> Tensor:
        assert self._now is not None
        position = len(self._tenths)
        tenths = [min(9, int(10 * sure)) for sure in confidence(scores).tolist()]  # (B,)
        reach = self._reach or [1.0] * len(tenths)
        self._reach = [r * self._now.chance(t, position) for r, t in zip(reach, tenths, strict=True)]
        self._tenths.append(tenths)
        # Its own pass has the head if another token may follow it.
        share = self._now.extend if position + 1 >= self._length else 1.0
        price = share * self.times.draft(self._now.exit_layer) + self.times.further(self._now.exit_layer)  # d + v
        worth = sum(self._reach) / len(self._reach) > self._rate * price or (self._tried and position == 0)
        self._ended = not worth
        return torch.full((len(tenths),), worth, dtype=torch.bool, device=scores.device)

    def drafted(self) -> None:
        self._drafted = thread_time()

    def end(self, steps: Sequence[Step]) -> None:
        if len(steps) != self._batch:
            if self._batch:
                self.times.rebase()
            self._batch = len(steps)
        draft, rest = self._seconds(steps)
        for prospect in self.prospects:
            prospect.forget(prospect is self._now)
        if self._now is not None:
            self._learn(self._now, steps, draft, rest)
        elif not any(step.num_drafted for step in steps):  # else something was found elsewhere
            self.times.add(("plain",), draft + rest)

    def _seconds(self, steps: Sequence[Step]) -> tuple[float, float]:
        """What the round's draft took, and all that followed it."""
        if self._processor:
            return self._drafted - self._began, thread_time() - self._drafted
        draft = sum(step.draft_seconds for step in steps)
        return draft, sum(step.verify_seconds + step.rollback_seconds for step in steps)

    def _learn(self, prospect: Prospect, steps: Sequence[Step], draft: float, rest: float) -> None:
        """What the round says of the exit that drafted in it, where it was looked at, and of its times."""
        looks = len(self._tenths)
        if not looks:
            return
        drafted = looks - self._ended
        e = prospect.exit_layer
        self.times.add(("draft", e), draft / (looks + (0 if self._ended else prospect.extend)))
        self.times.add(("verify", e, drafted), rest)
        for position in range(looks):
            prospect.asked[position] += 1
            prospect.went[position] += position < drafted
        for row, step in enumerate(steps):
            tenths = [at[row] for at in self._tenths[: min(drafted, step.num_drafted)]]
            prospect.judge(tenths, step.num_accepted)

    def again(self) -> Adaptive:
        """For the next call: knows what this one does, and is ready to learn that all is different now."""
        copy = deepcopy(self)
        copy._begin_chain()
        copy._now = None
        copy._since, copy._wait = 0, min(copy._wait, 8)
        for prospect in copy.prospects:
            prospect.doubt()
        return copy
