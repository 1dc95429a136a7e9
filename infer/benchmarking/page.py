"""A benchmark's record as a page to send around: one file, with tables, plots, conditions and the record itself."""

import json
import re
from collections.abc import Sequence
from typing import Any

from infer.benchmarking import figures as draw
from infer.benchmarking import page_parts as html
from infer.benchmarking import report
from infer.benchmarking.batches import pays_until
from infer.benchmarking.sections import Records, batch_section, mode_sections
from infer.conditions import describe

_MODES = ("greedy", "sampled")
_NOISY = 0.2  # of the speedup: repeats that lie further apart are told
_TERMS = (
    ("speedup", "new tokens per second of wall time, prefill included, over plain generate's: of sums over all calls"),
    ("median", "the same ratio prompt by prompt, and the middle one of these"),
    ("spread", "the least and the largest speedup of a repeat: what the machine's own noise is worth"),
    ("decode", "the speedup after each call's first tokens, so without the prefill"),
    ("CPU", "the speedup by processor time, which other work on the machine changes less; says little on a GPU"),
    ("accepted", "mean acceptance length: tokens a verify step commits, the model's own one included; plain has 1"),
    ("acceptance", "draft acceptance rate: accepted over drafted tokens"),
    ("TTFT", "from the call to its first tokens; they are a whole round's where tokens are drafted"),
    ("TPOT", "the rest of the call over the other tokens"),
    ("gap", "between the bursts in which tokens come: a reader waits as long, though more than one may come"),
    ("equal", "greedy outputs that are plain generate's token for token"),
    (
        "near-tie",
        "an output parts where two tokens are as probable within the model's own rounding; else it is a fault",
    ),
)


def benchmark_page(result: dict[str, Any]) -> str:
    """The whole document, from what a comparison wrote as JSON: of arms, of budgets or of batches."""
    conditions = result["conditions"]
    modes = [mode for mode in _MODES if mode in result]
    parts = [html.heading(f"{result['model']}: decoding measured", 1)]
    if modes:
        parts += [html.paragraph(headline(result, modes[0]), "headline"), _warning(result, modes)]
        parts.append(_cards(result[modes[0]]))
    for mode in modes:
        parts += mode_sections(result, mode)
    for mode, records in result.get("batches", {}).items():
        drafting = dict.fromkeys(record["arm"] for record in records if record["drafts"] is not None)
        parts += [html.paragraph(f"{mode}: {pays_until(records, arm)}.".capitalize(), "headline") for arm in drafting]
        parts.append(batch_section(mode, records, describe(conditions)))
    parts.append(html.section("What the words mean", html.definitions(_TERMS)))
    parts.append(html.section("Conditions", html.table((), _conditions(conditions), text=True)))
    parts.append(html.section("The record", html.details("All numbers, as JSON", _json(result), "record")))
    return html.page(f"{result['model']}: decoding measured", parts)


def headline(result: dict[str, Any], mode: str) -> str:
    """What came out, in two sentences."""
    records, found = result[mode], result["conditions"]
    ranked = sorted((r for r in records[1:] if r.get("speedup")), key=lambda record: -record["speedup"])
    if not ranked:
        return "Nothing could be compared with plain decoding: every other arm failed."
    machine = found["cpu"] if found["device"] == "cpu" else found["device"]
    threads = f" with {found['threads']} thread{'s' * (found['threads'] > 1)}" if found["device"] == "cpu" else ""
    best, where = ranked[0], f"on {found['num_prompts']} prompts, {mode}, in {found['dtype']} on {machine}{threads}"
    text = (
        f"{draw.label(best)} decodes {best['speedup']:.2f} times as fast as plain generate {where}."
        if best["speedup"] > 1
        else f"Nothing decodes faster than plain generate {where}: {draw.label(best)} comes nearest, with "
        f"{best['speedup']:.2f} times its speed."
    )
    chain = next((record for record in ranked if record["arm"] == "self-speculative"), best)
    if chain is not best:
        text += f" Early-exit drafts alone, {draw.label(chain)}, reach {chain['speedup']:.2f}."
    return text + _equality(records)


def _equality(records: Records) -> str:
    compared = [record for record in records[1:] if "equal_outputs" in record]
    total, equal = (sum(record[name] for record in compared) for name in ("num_outputs", "equal_outputs"))
    if not total:
        return ""
    ties, faults = (sum(record[name] for record in compared) for name in ("near_ties", "faults"))
    if equal == total:
        return f" All {total} outputs compared are plain generate's, token for token."
    other = f" and {faults} at what rounding does not explain" if faults else ""
    return f" Of {total} outputs compared {equal} are plain generate's; {ties} part at near-ties{other}."


def _warning(result: dict[str, Any], modes: Sequence[str]) -> str:
    """Whether the numbers are as noisy as all that."""
    told = []
    for record in (record for mode in modes for record in result[mode][1:]):
        found = record.get("speedup_by_repeat") or [0]
        if record.get("speedup") and max(found) - min(found) > _NOISY * record["speedup"]:
            told.append(draw.label(record))
    if not told:
        return ""
    text = f"Repeats differ by more than {_NOISY:.0%} of the speedup ({', '.join(dict.fromkeys(told))}): the machine "
    return html.paragraph(text + "was busy or the prompts few. Trust the spread before the speedup.", "warning")


def _cards(records: Records) -> str:
    ranked = sorted((r for r in records[1:] if r.get("speedup")), key=lambda record: -record["speedup"])
    if not ranked:
        return ""
    best, plain = ranked[0], records[0]
    numbers = [
        (f"{best['speedup']:.2f} ×", f"plain generate, {draw.label(best)}"),
        (f"{best['tokens_per_second']:.1f}", f"tokens/s; plain {plain['tokens_per_second']:.1f}"),
    ]
    if best.get("decode_speedup"):
        numbers.append((f"{best['decode_speedup']:.2f} ×", "without prefill"))
    if best.get("num_drafted"):
        numbers.append((f"{best['mean_acceptance_length']:.2f}", "tokens a verify step"))
    ttft = [record["latency"]["ttft"] for record in (best, plain)]
    if None not in ttft:
        numbers.append(
            (f"{1000 * ttft[0]['median']:.0f} ms", f"to the first tokens; plain {1000 * ttft[1]['median']:.0f}")
        )
    if "equal_outputs" in best:
        numbers.append((report.equal(best), "outputs equal to plain generate's"))
    return html.cards(numbers)


def _conditions(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _text(value)) for name, value in found.items()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)


def _json(result: dict[str, Any]) -> str:
    """Indented, but rows of numbers on one line: line breaks stand between values alone, never inside a string."""
    number = r"(?:-?\d[\d.eE+-]*|null)"
    text = json.dumps(result, indent=1, allow_nan=False)
    return re.sub(rf"\[\n\s*({number}(?:,\n\s*{number})*)\n\s*\]", lambda found: f"[{_joined(found[1])}]", text)


def _joined(lines: str) -> str:
    return " ".join(lines.split())
