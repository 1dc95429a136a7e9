"""What a run of decoding steps took and brought, in words."""

from dataclasses import dataclass, field
from time import perf_counter

from layerskip.decode.stats import Statistics
from layerskip.decode.streaming import Piece


@dataclass
class Tally:
    """Counts pieces as they come; the clock runs from its making to the last piece."""

    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0  # from the start to the last piece, prefill included
    first_seconds: float | None = None  # from the start to the first step
    _start: float = field(default_factory=perf_counter, repr=False)

    def add(self, piece: Piece) -> None:
        """Count the piece's step."""
        self.seconds = perf_counter() - self._start
        if piece.step is not None:
            self.first_seconds = self.seconds if self.first_seconds is None else self.first_seconds
            self.statistics.add(piece.step)

    def merge(self, other: "Tally") -> None:
        """Add another run's counts and seconds to these."""
        self.statistics.merge(other.statistics)
        self.seconds += other.seconds

    def line(self) -> str:
        """Tokens, speed and the two rates."""
        counts = self.statistics
        speed = counts.num_tokens / self.seconds if self.seconds else float("nan")
        return f"{counts.num_tokens} tokens in {self.seconds:.2f} s, {speed:.1f} tokens/s, {self.rates()}"

    def rates(self) -> str:
        """The two rates."""
        counts = self.statistics
        if counts.num_drafted == 0:
            return "plain decoding"
        return (
            f"mean_acceptance_length {counts.mean_acceptance_length:.2f}, "
            f"draft_acceptance_rate {counts.draft_acceptance_rate:.2f}"
        )

    def details(self) -> str:
        """Where the time went, and how acceptance falls with the draft position."""
        counts = self.statistics
        parts = {
            "draft": counts.draft_seconds,
            "verify": counts.verify_seconds,
            "rollback": counts.rollback_seconds,
        }
        if self.first_seconds is not None:  # of a single run
            prefill = max(0.0, self.first_seconds - counts.first_step_seconds)
            parts = {"prefill": prefill, **parts}
            parts["other"] = max(0.0, self.seconds - sum(parts.values()))
        shares = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
        text = f"{counts.num_steps} verify steps: {shares}"
        if self.first_seconds is not None:
            text += f"; first tokens after {self.first_seconds:.2f} s"
        if counts.num_drafted:
            rates = " ".join(f"{rate:.2f}" for rate in counts.acceptance_by_position)
            histogram = " ".join(map(str, counts.acceptance_histogram))
            text += f"; steps that accepted 0, 1, ... tokens: {histogram}; acceptance by position {rates}"
        return text
