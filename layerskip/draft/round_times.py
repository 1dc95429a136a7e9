"""What the parts of a round take in the run that goes on: by its own steps, and before those by the weights they read.

A median of the last few is kept of each part: whatever else the machine does makes some of them long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

# ("plain",): a round without a draft; ("draft", E): a pass through layers [0:E) and the head; ("verify", E, n): layers
# [E:L) and the head over n drafted tokens and the root, with all that follows.
Part = tuple[str | int, ...]

WINDOW = 9  # rounds
SLOPE = 0.03  # what a further position adds to a verification, as a share of it, before it is measured
TICK = 1e-9  # seconds, the least that a part takes: a coarse clock may not have moved
CERTAIN = 20.0  # rounds, times squared distance of their widths, that this counts for


class RoundTimes:
    """Seconds a round, by parts.

    Args:
        weights: what each part reads, in any unit: of ("plain",), and of each exit ("draft", E), ("verify", E).
    """

    def __init__(self, weights: Mapping[Part, float]) -> None:
        self._weights = dict(weights)
        self._seen: dict[Part, deque[float]] = {}
        self._known: dict[Part, tuple[float, float]] = {}  # seconds and slope, until something is seen

    def add(self, part: Part, seconds: float) -> None:
        """A round's part took so long."""
        self._seen.setdefault(part, deque(maxlen=WINDOW)).append(max(seconds, TICK))
        self._known.clear()

    def rebase(self) -> None:
        """All has changed alike (the batch is another size): what was known counts as weights, until seen anew."""
        self._weights = {part: self._line(part)[0] for part in self._weights}
        self._seen.clear()
        self._known.clear()

    @property
    def knows_plain(self) -> bool:
        """Whether a round without a draft was seen."""
        return ("plain",) in self._seen

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self._line(("plain",))[0]

    def draft(self, exit_layer: int) -> float:
        """Seconds of a pass through layers [0:E) and the head."""
        return self._line(("draft", exit_layer))[0]

    def verify(self, exit_layer: int, num_drafted: float) -> float:
        """Seconds of a verification of so many drafted tokens, on average, and of the rest of its round."""
        base, slope = self._line(("verify", exit_layer))
        return base + slope * num_drafted

    def further(self, exit_layer: int) -> float:
        """Seconds that one more drafted token adds to a verification."""
        return self._line(("verify", exit_layer))[1]

    def _line(self, part: Part) -> tuple[float, float]:
        """Seconds of a part, without drafted tokens, and what each of these adds."""
        if part not in self._known:
            widths = {
                int(key[2]) if len(key) > 2 else 0: values for key, values in self._seen.items() if key[:2] == part
            }
            if widths:
                self._known[part] = fit(widths)
            else:
                base = self._weights[part] * self._unit(part[0])
                self._known[part] = base, SLOPE * base
        return self._known[part]

    def _unit(self, kind: str | int) -> float:
        """Seconds a weight: of this kind of part where one was seen, else of any; 1 before all."""
        seen = {part[:2] for part in self._seen}
        units = [(part[0], self._line(part)[0] / self._weights[part]) for part in sorted(seen, key=str)]
        alike = [unit for other, unit in units if other == kind]
        return median(alike or [unit for _, unit in units] or [1.0])


def fit(widths: Mapping[int, deque[float]]) -> tuple[float, float]:
    """Seconds at 0 and slope of the line through the medians at each width: least squares, drawn towards `SLOPE`."""
    points = [(n, median(seconds), len(seconds)) for n, seconds in widths.items()]
    count = sum(weight for *_, weight in points)
    x = sum(weight * n for n, _, weight in points) / count
    y = sum(weight * seconds for _, seconds, weight in points) / count
    spread = sum(weight * (n - x) ** 2 for n, _, weight in points)
    covariance = sum(weight * (n - x) * (seconds - y) for n, seconds, weight in points)
    slope = max(0.0, (covariance + CERTAIN * SLOPE * y) / (spread + CERTAIN))
    return max(y - slope * x, y / 2), slope
