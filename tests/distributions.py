"""Is a sample from a distribution? A chi-square test without SciPy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def chi_square_p_value(samples: Sequence[Hashable], expected: Mapping[Hashable, float]) -> float:
    """Chance of a fit as bad as this if `samples` are drawn from `expected` (outcome -> probability).

    Outcomes expected fewer than five times are pooled. Wilson and Hilferty's normal approximation (1931).
    """
    counts, n = Counter(samples), len(samples)
    if set(counts) - {outcome for outcome, p in expected.items() if p > 0}:
        return 0.0  # something impossible was seen
    cells, pooled_seen, pooled_expected = [], 0.0, 0.0
    for outcome, probability in expected.items():
        if n * probability >= 5:
            cells.append((counts[outcome], n * probability))
        else:
            pooled_seen += counts[outcome]
            pooled_expected += n * probability
    if pooled_expected > 0:
        cells.append((pooled_seen, pooled_expected))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = len(cells) - 1
    cube = (statistic / degrees) ** (1 / 3)
    z = (cube - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))
