"""What an exit has brought so far in a run, and what it promises: see `adaptive.py`."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.draft.exits import KnownExit
from layerskip.draft.round_times import RoundTimes

FORGET = 0.98  # a round of its own
FORGET_IDLE = 0.998  # any other
KEPT = 2.0  # observations that a position's acceptance in the last call counts for in the next
PRIOR = 3.0  # observations that what the checkpoint says counts for


class Prospect:
    """An exit that may draft, and what its rounds brought.

    Args:
        known: what the checkpoint says of it.
        acceptance: of a drafted token, to begin with.
        extend: what a pass without the head takes, as a share of one with it.
        most: tokens of the longest chain.
    """

    def __init__(self, known: KnownExit, acceptance: float, extend: float, most: int) -> None:
        self.exit_layer, self.extend, self.acceptance = known.exit_layer, extend, acceptance
        self.asked, self.went = [0.0] * most, [0.0] * most  # by position: looked at, and drafted then
        self.judged, self.stayed = [0.0] * most, [0.0] * most  # by position: of rows, verified and accepted
        self.hoped = [0.0] * most  # by position: sum of the chances that those judged had by their confidence
        sure = [(tenth + 0.5) / 10 for tenth in range(10)]
        # Confidence says how often a taught exit is right, but for one sampled broadly, as is its target.
        chances = [(c + acceptance) / 2 if known.trained else acceptance * 2 * c for c in sure]
        self.priors = chances
        self.sure_judged, self.sure_stayed = [0.0] * 10, [0.0] * 10  # by tenth of confidence

    def forget(self, own: bool) -> None:
        """A round has passed, its own or another's."""
        self._shrink(FORGET if own else FORGET_IDLE)

    def doubt(self) -> None:
        """All may be different from now on: what was seen counts for a few observations only."""
        self._shrink(KEPT / max([KEPT, *self.judged[:1]]))  # no position at all where nothing may be drafted

    def _shrink(self, share: float) -> None:
        for sums in (self.asked, self.went, self.judged, self.stayed, self.hoped, self.sure_judged, self.sure_stayed):
            sums[:] = [share * value for value in sums]

    def chance(self, tenth: int, position: int) -> float:
        """That a token drafted with this confidence stays if all before it do."""
        own = (self.sure_stayed[tenth] + PRIOR * self.priors[tenth]) / (self.sure_judged[tenth] + PRIOR)
        return min(1.0, own * (self.stayed[position] + PRIOR) / (self.hoped[position] + PRIOR))

    def judge(self, tenths: Sequence[int], accepted: int) -> None:
        """A row drafted tokens of these confidences, and so many of them stayed."""
        for position, tenth in enumerate(tenths[: accepted + 1]):
            stayed = position < accepted
            self.hoped[position] += self.chance(tenth, position)
            self.judged[position] += 1
            self.stayed[position] += stayed
            self.sure_judged[tenth] += 1
            self.sure_stayed[tenth] += stayed

    def plan(self, times: RoundTimes, luck: float = 0.0) -> tuple[float, int]:
        """Tokens a second of the most promising length, and that length.

        Args:
            luck: how much better than it seems the acceptance may be, see `LUCK`.
        """
        draft, best = times.draft(self.exit_layer), (0.0, 1)
        tokens, looks, drafted = 1.0, 0.0, 0.0  # of a round as long as this: committed, looked at, drafted, in the mean
        going, reach = 1.0, 1.0  # chance that the chain gets this far, and that all of it stays
        likely = self.acceptance  # of a position where nothing was seen: as of the one before
        for position in range(len(self.asked)):
            seen = self.judged[position]
            likely = (self.stayed[position] + PRIOR * likely) / (seen + PRIOR)
            hoped = likely + luck * (1 - likely) / (seen + PRIOR) ** 0.5
            goes = (self.went[position] + 1) / (self.asked[position] + 1)
            looks += going
            going *= goes
            reach *= goes * hoped
            tokens, drafted = tokens + reach, drafted + going
            seconds = (looks + going * self.extend) * draft + times.verify(self.exit_layer, drafted)
            best = max(best, (tokens / seconds, position + 1))
        return best
