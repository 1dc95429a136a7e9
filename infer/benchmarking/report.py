"""A benchmark's records as tables for people."""

from collections.abc import Sequence
from typing import Any

# spread: least and most speedup of a repeat; decode: speedup after the first tokens, so without prefill; accepted: mean
# acceptance length, tokens a verify step commits; acceptance: draft acceptance rate; equal: outputs equal to the
# baseline's, of all.
COLUMNS = (
    *("arm", "exit", "drafts", "tokens", "tokens/s", "speedup", "median", "spread", "decode"),
    *("accepted", "acceptance", "equal"),
)
LATENCY_COLUMNS = (
    *("arm", "TTFT ms", "p95", "TPOT ms", "p95", "gap ms", "p95", "E2E ms", "p95"),
    *("req/s", "errors", "time-outs", "warm-up s", "by CPU"),
)
LATENCY_NOTE = (
    "Median and 95th percentile. TTFT: call to first tokens; TPOT: the rest of the call over the other tokens; gap: "
    "between the bursts a round hands out; E2E: the whole call; warm-up: the first call, which no other number "
    "counts; by CPU: speedup by processor time, which a busy machine changes less."
)
ROUND_COLUMNS = (
    *("arm", "rounds", "drafted", "accepted", "by position", "rounds by accepted"),
    "prefill/draft/verify/rollback/other",
)
ROUND_NOTE = (
    "drafted, accepted: tokens of all rounds; by position: share of the drafts there that was accepted; rounds by "
    "accepted: how many rounds accepted 0, 1, 2, ... tokens; last: where the calls' time went."
)
MEMORY_COLUMNS = ("arm", "KV cache MiB", "for speculation", "share", "GPU peak MiB")
MEMORY_NOTE = (
    "KV cache: keys and values of the longest sequence. The early layers' exist once, for draft and verification: "
    "self-speculation adds the slots of one draft; assistant_early_exit keeps a second cache of the early "
    "layers. GPU peak: weights included; a CPU's peak is the whole process's, not one arm's."
)


def row(record: dict[str, Any]) -> list[str]:
    """One arm's record, for the table whose columns are `COLUMNS`."""
    head = [record["arm"], cell(record["exit_layer"]), cell(record["drafts"])]
    if record["error"] is not None:
        return [f"{head[0]}: failed, {record['error']}", *head[1:], *["-"] * (len(COLUMNS) - 3)]
    return [
        *head,
        str(record["tokens"]),
        f"{record['tokens_per_second']:.1f}",
        cell(record.get("speedup"), ".2f"),
        cell(record.get("median_speedup"), ".2f"),
        spread(record),
        cell(record.get("decode_speedup"), ".2f"),
        cell(record.get("mean_acceptance_length"), ".2f"),
        cell(record.get("draft_acceptance_rate"), ".2f"),
        equal(record),
    ]


def spread(record: dict[str, Any]) -> str:
    """Least and most speedup of a repeat."""
    found = record.get("speedup_by_repeat")
    return f"{min(found):.2f}-{max(found):.2f}" if found else "-"


def equal(record: dict[str, Any]) -> str:
    """Outputs equal to the baseline's, of those compared."""
    return f"{record['equal_outputs']}/{record['num_outputs']}" if "equal_outputs" in record else "-"


def latency_row(record: dict[str, Any]) -> list[str]:
    """One arm's record, for the table whose columns are `LATENCY_COLUMNS`."""
    cells = []
    for name in ("ttft", "tpot", "gap", "end_to_end"):
        found = record.get("latency", {}).get(name)
        cells += ["-", "-"] if found is None else [f"{1000 * found[key]:.1f}" for key in ("median", "p95")]
    return [
        record["arm"],
        *cells,
        cell(record.get("requests_per_second"), ".2f"),
        str(record["num_errors"]),
        str(record["num_timeouts"]),
        cell(record.get("warm_up_seconds"), ".2f"),
        cell(record.get("processor_speedup"), ".2f"),
    ]


def round_row(record: dict[str, Any]) -> list[str]:
    """One arm's record, for the table whose columns are `ROUND_COLUMNS`."""
    by_position, histogram = record.get("acceptance_by_position"), record.get("acceptance_histogram")
    parts = record.get("seconds_by_part") or {}
    shares = "/".join(f"{seconds / record['seconds']:.0%}" for seconds in parts.values()) if len(parts) > 2 else "-"
    return [
        record["arm"],
        *(cell(record.get(name)) for name in ("num_steps", "num_drafted", "num_accepted")),
        " ".join(f"{rate:.2f}".lstrip("0") for rate in by_position) if by_position else "-",
        " ".join(map(str, histogram)) if histogram else "-",
        shares,
    ]


def memory_row(record: dict[str, Any]) -> list[str]:
    """One arm's record, for the table whose columns are `MEMORY_COLUMNS`."""
    total, extra = record.get("kv_cache_bytes"), record.get("kv_cache_speculation_bytes") or 0
    cells = ["-"] * 3 if not total else [f"{total / 2**20:.3f}", f"{extra / 2**20:.3f}", f"{extra / total:.1%}"]
    peak = record.get("peak_bytes")
    return [record["arm"], *cells, "-" if peak is None else f"{peak / 2**20:.0f}"]


def explain(record: dict[str, Any]) -> list[str]:
    """A line for each output of an arm that is not the baseline's, and for each call that failed."""
    lines = [
        f"{record['arm']}: output {each['prompt']} differs at token {each['position']} "
        f"(top-2 margin {each['margin']:.2g}, gap {each['gap']:.2g}, rounding {each['rounding']:.2g}): {verdict(each)}"
        for each in record.get("differences", [])
    ]
    if record["error"] is None:
        lines += [
            f"{record['arm']}: prompt {each['prompt']}, repeat {each['repeat']}: {each['reason']}"
            for each in record.get("failures", [])
        ]
    return lines


def verdict(difference: dict[str, Any]) -> str:
    """What a difference is."""
    return "a near-tie" if difference["near_tie"] else "A FAULT, rounding does not explain it"


def tables(records: Sequence[dict[str, Any]], verbose: bool) -> list[tuple[str, Sequence[str], list[list[str]], str]]:
    """Those beside the first: name, columns, rows and how to read them."""
    latency = ("latency", LATENCY_COLUMNS, [latency_row(record) for record in records], LATENCY_NOTE)
    rounds = ("rounds", ROUND_COLUMNS, [round_row(record) for record in records], ROUND_NOTE)
    memory = ("memory", MEMORY_COLUMNS, [memory_row(record) for record in records], MEMORY_NOTE)
    return [latency, rounds, memory] if verbose else [memory]


def label(record: dict[str, Any]) -> str:
    """An arm, and where it drafts its exit layer and what that drafts."""
    return (
        record["arm"]
        if record["drafts"] is None
        else f"{record['arm']} {record['exit_layer'] or '-'}/{record['drafts']}"
    )


def cell(value: float | str | None, form: str = "") -> str:
    """A value in a format; `-` where there is none."""
    return "-" if value is None else format(value, form)
