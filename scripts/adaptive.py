"""Does exit_layer="auto", num_draft_tokens="auto" keep up with the best fixed setting, and with plain decoding?

    python scripts/adaptive.py MODEL [PROMPTS.jsonl] [--exit-layers 2,3] [--num-draft-tokens 1,2,4] [--temperature 1.5]

PROMPTS.jsonl has {"prompt": ..., "kind": ...} a line; without it a few of code, prose and lists that are built in.
Every prompt is decoded by all arms in turn, plain decoding by this kit's own loop among them, `--repeats` times. Auto
remembers what earlier calls taught it, unless `--cold`. Times are the decoding thread's processor time on one torch
thread, since wall time also counts whatever else the machine does. Printed are, for each kind and for all together,
time(auto) / time(plain) and time(auto) / time(best fixed setting of that kind), then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

PROMPTS = {
    "code": [
        "def read_lines(path):\n    with open(path) as file:\n",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
        "import os\nimport sys\n\ndef main(argv):\n    ",
        "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n\n    def test_",
    ],
    "prose": [
        "The history of the lighthouse begins with a storm. In the winter of that year",
        "When the module is imported, the interpreter first looks for",
        "She opened the letter slowly, and the first thing that she saw was",
        "Two reasons speak against this plan. The first is that",
    ],
    "lists": [
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
        "January, February, March, April, May, June,",
        "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\n",
        "Monday: open\nTuesday: open\nWednesday: open\nThursday:",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint folder or Hub id")
    parser.add_argument("prompts", nargs="?", help="jsonl of prompts and their kinds (default: built in)")
    parser.add_argument("--exit-layers", type=numbers, help="of the fixed settings (default: what auto chooses from)")
    parser.add_argument("--num-draft-tokens", type=numbers, default=[1, 2, 4, 6])
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--per-kind", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--lookup", default="off", choices=("off", "hybrid"))
    parser.add_argument("--cold", action="store_true", help="auto forgets before every call what others taught it")
    options = parser.parse_args()
    model, tokenizer = load(options)
    arms = arms_of(model, options)
    seconds = measure(model, tokenizer, arms, options)
    record = {"model": options.model, "temperature": options.temperature, "kinds": ratios(seconds)}
    print(f"{'kind':>12}  auto/plain  auto/best fixed  best fixed  tokens/s plain")
    for kind, found in record["kinds"].items():
        print(
            f"{kind:>12}  {found['auto_over_plain']:10.3f}  {found['auto_over_best_fixed']:15.3f}  "
            f"{found['best_fixed']:>10}  {found['plain_tokens_per_second']:14.1f}"
        )
    print(json.dumps(record))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def prompts_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Prompts by kind."""
    found: dict[str, list[str]] = defaultdict(list)
    if options.prompts is None:
        found.update(PROMPTS)
    else:
        for line in Path(options.prompts).read_text().splitlines():
            row = json.loads(line)
            found[row.get("kind", "given")].append(row["prompt"])
    return {kind: texts[: options.per_kind] for kind, texts in found.items()}


def load(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    return model, AutoTokenizer.from_pretrained(options.model)


def arms_of(model, options: argparse.Namespace) -> dict[str, dict[str, Any]]:  # type: ignore[no-untyped-def]
    """Name -> how to draft."""
    from layerskip.draft.exits import known_exits

    exits = options.exit_layers or [known.exit_layer for known in known_exits(model)]
    arms: dict[str, dict[str, Any]] = {"plain": {"exit_layer": None, "lookup": "off"}}
    arms["auto"] = {"exit_layer": "auto", "num_draft_tokens": "auto", "lookup": options.lookup}
    for e in exits:
        for n in options.num_draft_tokens:
            arms[f"{e}/{n}"] = {"exit_layer": e, "num_draft_tokens": n, "lookup": options.lookup}
    return arms


def measure(model, tokenizer, arms, options) -> dict[str, dict[str, list[float]]]:  # type: ignore[no-untyped-def]
    """Seconds a token, of every kind, arm and call."""
    import torch

    import layerskip
    from layerskip.draft.remembered import forget

    sampling = {"do_sample": False} if options.temperature == 0 else {"do_sample": True, "top_k": 0}
    if options.temperature:
        sampling["temperature"] = options.temperature
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, index, text in in_turn(prompts_of(options)):
        prompt = tokenizer(text, return_tensors="pt").input_ids
        mask = torch.ones_like(prompt)
        for repeat in range(options.repeats):
            for name, drafting in list(arms.items())[:: 1 if repeat % 2 else -1]:
                if options.cold:
                    forget(model)
                torch.manual_seed(1000 * index + repeat)
                call = {"attention_mask": mask, "eos_token_id": None, "pad_token_id": 0, **sampling, **drafting}
                if not seconds[kind][name]:  # views, checks and buffers are made once
                    layerskip.generate(model, prompt, **{**call, "max_new_tokens": 2})
                    if options.cold:
                        forget(model)
                start = thread_time()
                output = layerskip.generate(model, prompt, max_new_tokens=options.max_new_tokens, **call)
                spent = thread_time() - start
                seconds[kind][name].append(spent / (output.shape[1] - prompt.shape[1]))
        print(f"{kind} {index}: measured", file=sys.stderr)
    return seconds


def in_turn(prompts: dict[str, list[str]]) -> Iterator[tuple[str, int, str]]:
    """A prompt of every kind, then the next of each."""
    for index in range(max(map(len, prompts.values()))):
        for kind, texts in prompts.items():
            if index < len(texts):
                yield kind, index, texts[index]


def ratios(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Of each kind, and of all together: auto against plain decoding and against the fixed setting that was best."""
    everything: dict[str, list[float]] = defaultdict(list)
    for arms in seconds.values():
        for name, spent in arms.items():
            everything[name] += spent
    found = {}
    for kind, arms in {**seconds, "all": everything}.items():
        total = {name: sum(spent) for name, spent in arms.items()}
        best = min((name for name in total if name not in ("plain", "auto")), key=total.__getitem__)
        found[kind] = {
            "auto_over_plain": round(total["auto"] / total["plain"], 4),
            "auto_over_best_fixed": round(total["auto"] / total[best], 4),
            "best_fixed": best,
            "best_fixed_over_plain": round(total[best] / total["plain"], 4),
            "plain_tokens_per_second": round(len(arms["plain"]) / total["plain"], 2),
            "calls": len(arms["plain"]),
        }
    return found


if __name__ == "__main__":
    main()
