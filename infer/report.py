"""A benchmark's numbers: rows for people, a record for machines."""

import math
from collections.abc import Sequence
from typing import Any

from infer.differences import Difference
from infer.measurement import Measured
from infer.memory import KeyValueBytes

# spread: least and most speedup of a repeat; accepted: mean acceptance length, tokens a verify step commits;
# acceptance: draft acceptance rate; equal: outputs equal to the baseline's, of all; last: shares of the time.
COLUMNS = (
    *("arm", "exit", "drafts", "tokens", "tokens/s", "speedup", "median", "spread"),
    *("accepted", "acceptance", "equal", "draft/verify/rollback"),
)
MEMORY_COLUMNS = ("arm", "KV cache MiB", "for speculation", "share", "GPU peak MiB")
MEMORY_NOTE = (
    "KV cache: keys and values of the longest sequence. The early layers' exist once, for draft and verification: "
    "self-speculation adds the slots of one draft; assistant_early_exit keeps a second cache of the early "
    "layers. GPU peak: weights included; a CPU's peak is the whole process's, not one arm's."
)


def record(
    measured: Measured,
    baseline: Measured,
    differences: Sequence[Difference | None] | None,
    memory: KeyValueBytes | None = None,
) -> dict[str, Any]:
    """One arm, for JSON: rates and speedups are None where there is nothing to divide.

    Args:
        differences: from the baseline's output, for each prompt; None where outputs are sampled.
        memory: of its longest sequence.
    """
    setting = measured.arm.setting
    result: dict[str, Any] = {
        "arm": measured.arm.name,
        "exit_layer": setting.exit_layer if setting else None,
        "num_draft_tokens": setting.num_draft_tokens if setting else None,
        "drafts": measured.arm.drafts if setting else None,
        "error": measured.error,
    }
    if measured.error is not None:
        return result
    result |= {
        "tokens": measured.num_tokens,
        "seconds": round(measured.seconds, 4),
        "tokens_per_second": round(measured.tokens_per_second, 3),
        "peak_bytes": measured.peak_bytes,
        "kv_cache_bytes": memory.total if memory else None,
        "kv_cache_speculation_bytes": memory.speculation if memory else None,
        **_statistics(measured),
    }
    if baseline.error is None:
        result |= {
            "speedup": round(measured.speedup(baseline), 4),
            "median_speedup": round(measured.median_speedup(baseline), 4),
            "speedup_by_repeat": [round(value, 4) for value in measured.speedup_by_repeat(baseline)],
        }
    if differences is not None:
        found = [(index, each) for index, each in enumerate(differences) if each is not None]
        result |= {
            "num_outputs": len(differences),
            "equal_outputs": len(differences) - len(found),
            "near_ties": sum(each.near_tie for _, each in found),
            "differences": [{"prompt": index, **each.record()} for index, each in found],
        }
    return result


def _statistics(measured: Measured) -> dict[str, Any]:
    counts = measured.statistics
    if counts is None:
        return {}
    result: dict[str, Any] = {
        "num_steps": counts.num_steps,
        "mean_acceptance_length": _finite(counts.mean_acceptance_length),
        "draft_acceptance_rate": _finite(counts.draft_acceptance_rate),
    }
    if counts.drafted_at:
        result["acceptance_by_position"] = [round(rate, 4) for rate in counts.acceptance_by_position]
    if counts.verify_seconds:
        parts = {
            "draft": counts.draft_seconds,
            "verify": counts.verify_seconds,
            "rollback": counts.rollback_seconds,
        }
        result["shares"] = {name: round(seconds / measured.seconds, 4) for name, seconds in parts.items()}
    return result


def row(record: dict[str, Any]) -> list[str]:
    """One arm's record, for the table whose columns are `COLUMNS`."""
    head = [record["arm"], _text(record["exit_layer"]), _text(record["drafts"])]
    if record["error"] is not None:
        return [f"{head[0]}: failed, {record['error']}", *head[1:], *["-"] * (len(COLUMNS) - 3)]
    spread = record.get("speedup_by_repeat")
    shares = record.get("shares")
    equal = f"{record['equal_outputs']}/{record['num_outputs']}" if "equal_outputs" in record else "-"
    return [
        *head,
        str(record["tokens"]),
        f"{record['tokens_per_second']:.1f}",
        _text(record.get("speedup"), ".2f"),
        _text(record.get("median_speedup"), ".2f"),
        f"{min(spread):.2f}-{max(spread):.2f}" if spread else "-",
        _text(record.get("mean_acceptance_length"), ".2f"),
        _text(record.get("draft_acceptance_rate"), ".2f"),
        equal,
        "/".join(f"{share:.0%}" for share in shares.values()) if shares else "-",
    ]


def memory_row(record: dict[str, Any]) -> list[str]:
    """One arm's record, for the table whose columns are `MEMORY_COLUMNS`."""
    total, extra = record.get("kv_cache_bytes"), record.get("kv_cache_speculation_bytes") or 0
    cells = ["-"] * 3 if not total else [f"{total / 2**20:.3f}", f"{extra / 2**20:.3f}", f"{extra / total:.1%}"]
    peak = record.get("peak_bytes")
    return [record["arm"], *cells, "-" if peak is None else f"{peak / 2**20:.0f}"]


def explain(record: dict[str, Any]) -> list[str]:
    """A line for each output of an arm that is not the baseline's."""
    return [
        f"{record['arm']}: output {each['prompt']} differs at token {each['position']} "
        f"(top-2 margin {each['margin']:.2g}, gap {each['gap']:.2g}, rounding {each['rounding']:.2g}): "
        + ("a near-tie" if each["near_tie"] else "A FAULT, rounding does not explain it")
        for each in record.get("differences", [])
    ]


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _text(value: float | str | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
