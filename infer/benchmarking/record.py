"""What an arm's calls add up to, as a record for machines; docs/benchmark.md says what each name means."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from infer.benchmarking.differences import Difference
from infer.benchmarking.latency import summary
from infer.benchmarking.measurement import Measured
from infer.benchmarking.memory import KeyValueBytes


def record(
    measured: Measured,
    baseline: Measured,
    differences: Mapping[int, Difference | None] | None = None,
    memory: KeyValueBytes | None = None,
) -> dict[str, Any]:
    """One arm, for JSON: rates and speedups are None where there is nothing to divide.

    Args:
        differences: prompt -> from the baseline's output; None where outputs are sampled.
        memory: of its longest sequence.
    """
    setting = measured.arm.setting
    result: dict[str, Any] = {
        "arm": measured.arm.name,
        "exit_layer": setting.exit_layer if setting else None,
        "num_draft_tokens": setting.num_draft_tokens if setting else None,
        "drafts": measured.arm.drafts if setting else None,
        "error": measured.error,
        **_failures(measured),
    }
    if measured.error is not None:
        return result
    result |= {
        "num_calls": len(measured.calls),
        "tokens": measured.num_tokens,
        "seconds": round(measured.seconds, 4),
        "tokens_per_second": round(measured.tokens_per_second, 3),
        "decode_tokens_per_second": _rounded(measured.decode_tokens_per_second, 3),
        "requests_per_second": round(len(measured.calls) / measured.seconds, 4),
        **_warm_up(measured),
        "latency": _latency(measured),
        "peak_bytes": measured.peak_bytes,
        "kv_cache_bytes": memory.total if memory else None,
        "kv_cache_speculation_bytes": memory.speculation if memory else None,
        **_counts(measured),
        "seconds_by_part": _parts(measured),
    }
    if baseline.error is None:
        result |= _speedups(measured, baseline)
    if differences is not None:
        result |= _equality(differences)
    return result | {"calls": _calls(measured)}


def _failures(measured: Measured) -> dict[str, Any]:
    timeouts = sum(failure.timed_out for failure in measured.failures)
    return {
        "num_errors": len(measured.failures) - timeouts,
        "num_timeouts": timeouts,
        "failures": [{"repeat": f.repeat, "prompt": f.prompt, "reason": f.reason} for f in measured.failures],
    }


def _warm_up(measured: Measured) -> dict[str, Any]:
    """The first call's seconds, and how many of them as short a call does not take once it is warm: compiling, kernels'
    choice, first allocations."""
    first = measured.warm_up
    if first is None:
        return {"warm_up_seconds": None, "warm_up_excess_seconds": None}
    excess = None
    if measured.timings and first.timing is not None:
        # Warm, up to the same number of tokens: every call says when it had them.
        n = first.timing.num_tokens
        warm = [next((t for t, total in _totals(timing.bursts) if total >= n), None) for timing in measured.timings]
        known = [seconds for seconds in warm if seconds is not None]
        excess = first.seconds - sum(known) / len(known) if known else None
    return {"warm_up_seconds": round(first.seconds, 4), "warm_up_excess_seconds": _rounded(excess)}


def _totals(bursts: tuple[tuple[float, int], ...]) -> list[tuple[float, int]]:
    found, total = [], 0
    for seconds, tokens in bursts:
        total += tokens
        found.append((seconds, total))
    return found


def _latency(measured: Measured) -> dict[str, Any]:
    """Over all calls, in seconds; gaps over all gaps of all calls."""
    timings = measured.timings
    per_token = [timing.seconds_per_token for timing in timings]
    return {
        "ttft": summary([timing.first_seconds for timing in timings]),
        "tpot": summary([seconds for seconds in per_token if seconds is not None]),
        "gap": summary([gap for timing in timings for gap in timing.gaps]),
        "end_to_end": summary([output.seconds for output in measured.calls]),
    }


def _counts(measured: Measured) -> dict[str, Any]:
    """Of arms that count their rounds."""
    counts = measured.statistics
    if counts is None or not counts.num_steps:
        return {}
    result: dict[str, Any] = {
        "num_steps": counts.num_steps,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "drafted_per_step": round(counts.num_drafted / counts.num_steps, 4),
        "mean_acceptance_length": _finite(counts.mean_acceptance_length),
        "draft_acceptance_rate": _finite(counts.draft_acceptance_rate),
    }
    if counts.drafted_at:
        result["acceptance_by_position"] = [round(rate, 4) for rate in counts.acceptance_by_position]
        result["conditional_acceptance"] = [round(rate, 4) for rate in counts.conditional_acceptance]
        result["acceptance_histogram"] = counts.acceptance_histogram
    elif counts.num_drafted:
        # Another's loop: what it handed out at once is what was accepted, and one token more.
        bursts = Counter(tokens - 1 for timing in measured.timings for _, tokens in timing.bursts)
        result["acceptance_histogram"] = [bursts[n] for n in range(max(bursts, default=-1) + 1)]
    return result


def _parts(measured: Measured) -> dict[str, float] | None:
    """The calls' seconds, all of them: of arms that time their rounds prefill, draft, verify, rollback and other; of
    others what comes before the first token and after it."""
    counts, timings = measured.statistics, measured.timings
    if not timings:
        return None
    first = sum(timing.first_seconds for timing in timings)
    if counts is None or not counts.verify_seconds:
        parts = {"first_token": first}
        return _rest(parts, "decode", measured.seconds)
    parts = {
        "prefill": max(0.0, first - counts.first_step_seconds),
        "draft": counts.draft_seconds,
        "verify": counts.verify_seconds,
        "rollback": counts.rollback_seconds,
    }
    return _rest(parts, "other", measured.seconds)


def _rest(parts: dict[str, float], name: str, seconds: float) -> dict[str, float]:
    parts |= {name: max(0.0, seconds - sum(parts.values()))}
    return {name: round(value, 4) for name, value in parts.items()}


def _speedups(measured: Measured, baseline: Measured) -> dict[str, Any]:
    return {
        "speedup": _rounded(measured.speedup(baseline)),
        "median_speedup": _rounded(measured.median_speedup(baseline)),
        "speedup_by_repeat": [round(value, 4) for value in measured.speedup_by_repeat(baseline)],
        "speedup_by_prompt": [_rounded(value) for value in measured.speedup_by_prompt(baseline)],
        "decode_speedup": _rounded(measured.decode_speedup(baseline)),
        "median_decode_speedup": _rounded(measured.median_decode_speedup(baseline)),
        "processor_speedup": _rounded(measured.processor_speedup(baseline)),
    }


def _equality(differences: Mapping[int, Difference | None]) -> dict[str, Any]:
    found = {prompt: each for prompt, each in differences.items() if each is not None}
    return {
        "num_outputs": len(differences),
        "equal_outputs": len(differences) - len(found),
        "near_ties": sum(each.near_tie for each in found.values()),
        "faults": sum(not each.near_tie for each in found.values()),
        "differences": [{"prompt": prompt, **each.record()} for prompt, each in found.items()],
    }


def _calls(measured: Measured) -> dict[str, Any]:
    """What each call took, [repeat][prompt]; None where it failed."""

    def each(number: Callable[[Any], float | None]) -> list[list[float | None]]:
        return [[None if output is None else number(output) for output in row] for row in measured.outputs]

    return {
        "tokens": each(lambda output: len(output.tokens)),
        "seconds": each(lambda output: round(output.seconds, 5)),
        "ttft": each(lambda output: round(output.timing.first_seconds, 5) if output.timing else None),
    }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
