"""What a level of load brought, in the names of vLLM's `bench serve`; seconds inside, milliseconds in the record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.serving.request_queue import Request

_PERCENTILES = (("median", 0.5), ("p95", 0.95), ("p99", 0.99))


@dataclass(frozen=True)
class Objective:
    """A service-level objective: what a request must keep to count as good. None: anything."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met(self, request: Request) -> bool:
        """Whether an answer kept it; a single token has no TPOT to miss."""
        pairs = ((request.ttft, self.ttft_ms), (request.tpot, self.tpot_ms))
        return all(limit is None or seconds is None or 1000 * seconds <= limit for seconds, limit in pairs)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two neighbours, as numpy's default; values not empty."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


def summarize(answers: Sequence[Request], seconds: float, objective: Objective) -> dict[str, Any]:
    """All numbers of a level. Tokens and latencies are those of the requests that were answered whole.

    Args:
        answers: those that were answered, well or not.
        seconds: from the first arrival to the last answer.
    """
    done = [request for request in answers if request.error is None]
    tokens = sum(len(request.tokens) for request in done)
    bursts = sum(len(request.bursts) for request in done)
    good = sum(objective.met(request) for request in done)
    failures = [request.error for request in answers if request.error is not None and not request.timed_out]
    result: dict[str, Any] = {
        "completed": len(done),
        "timed_out": sum(request.timed_out for request in answers),
        "failed": len(failures),
        "errors": sorted(set(failures)),
        "duration": round(seconds, 4),
        "total_output_tokens": tokens,
        "output_throughput": _rate(tokens, seconds),
        "request_throughput": _rate(len(done), seconds),
        "request_goodput": _rate(good, seconds) if objective else None,
        # By Little's law; what is in flight and does not wait is being decoded.
        "mean_in_flight": _rate(sum(request.e2el for request in done), seconds),
        "mean_tokens_per_burst": _rate(tokens, bursts),
    }
    measured = {
        "queue": [request.started - request.arrived for request in done if request.started is not None],
        "ttft": [request.ttft for request in done],
        "tpot": [request.tpot for request in done if request.tpot is not None],
        "itl": [gap for request in done for gap in request.gaps],
        "e2el": [request.e2el for request in done],
    }
    for name, values in measured.items():
        result[f"mean_{name}_ms"] = round(1000 * sum(values) / len(values), 3) if values else None
        for word, share in _PERCENTILES:
            result[f"{word}_{name}_ms"] = round(1000 * percentile(values, share), 3) if values else None
    return result


def _rate(count: float, per: float) -> float | None:
    return round(count / per, 4) if per else None
