"""What self-speculation costs beside the model itself: time of a round outside its layers and head, and memory.

    python scripts/overhead.py [MODEL] [--exit-layer E] [--num-draft-tokens K]

Without MODEL the shape of SmolLM2-135M with random weights (30 layers, 576 wide, vocabulary 49,152, bfloat16).
Layers and head are timed by hooks, whose own cost counts as overhead. Times are the decoding thread's processor time
on one torch thread, since wall time also counts whatever else the machine does: milliseconds are lower quartiles over
all rounds, and the share is the median of shares each measured inside one round. Memory is the peak of a fresh process
(Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time

sys.path[0] = str(Path(__file__).resolve().parents[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="checkpoint folder or Hub id (default: SmolLM2-135M's shape)")
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    # Allocators differ from start to start by a few MiB.
    parser.add_argument("--processes", type=int, default=3, help="fresh ones an arm, of which the least peak counts")
    parser.add_argument("--arm", choices=("load", "plain", "self-speculative"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps({"peak_mib": peak_memory(options)}))
        return
    record = time_of_a_round(options)
    arms = ("load", "plain", "self-speculative")
    peaks = {arm: min(peak_of_fresh_process(arm) for _ in range(options.processes)) for arm in arms}
    record |= {f"peak_mib {arm}": round(peak, 1) for arm, peak in peaks.items()}
    record["peak over plain"] = round(peaks["self-speculative"] / peaks["plain"] - 1, 4)
    for name, value in record.items():
        print(f"{name:>28}  {value}")
    print(json.dumps(record))


def load(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM

    from scripts.shapes import smollm2_135m

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(smollm2_135m(), dtype=torch.bfloat16)
    prompt = torch.randint(3, model.config.vocab_size, (1, options.prompt_tokens))
    return model.eval(), prompt


def arguments(options: argparse.Namespace) -> dict:
    return {"do_sample": False, "max_new_tokens": options.max_new_tokens, "eos_token_id": None, "pad_token_id": 0}


def time_of_a_round(options: argparse.Namespace) -> dict:
    """Milliseconds of a round, of the model in it, and what is left; prefill apart."""
    import layerskip

    model, prompt = load(options)
    kwargs = arguments(options) | {"exit_layer": options.exit_layer, "num_draft_tokens": options.num_draft_tokens}
    list(layerskip.steps(model, prompt, **(kwargs | {"max_new_tokens": 16})))  # warm up

    rounds: list[dict[str, float]] = []
    inside = Clock(model)
    for _ in range(options.repeats):
        steps = layerskip.steps(model, prompt, **kwargs)
        next(steps)  # prefill and the first round are not counted
        while record := one_round(steps, inside, options.num_draft_tokens):
            rounds.append(record)
    inside.remove()
    return {
        "rounds": len(rounds),
        "ms a round": lower_quartile(rounds, "total"),
        "ms in layers and head": lower_quartile(rounds, "model"),
        "ms of overhead": lower_quartile(rounds, "overhead"),
        "overhead": round(median(record["overhead"] / record["total"] for record in rounds), 4),
        "ms a round (wall)": lower_quartile(rounds, "wall"),
    }


def one_round(steps, inside: Clock, num_draft_tokens: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Seconds of the next round, or nothing after the last one that drafts in full."""
    inside.seconds = 0.0
    wall, start = perf_counter(), thread_time()
    step = next(steps, None)
    total, wall = thread_time() - start, perf_counter() - wall
    if step is None or step.num_drafted < num_draft_tokens:
        return {}
    return {"total": total, "model": inside.seconds, "overhead": total - inside.seconds, "wall": wall}


def lower_quartile(rounds: list[dict[str, float]], name: str) -> float:
    return round(1e3 * quantiles([record[name] for record in rounds])[0], 3)


class Clock:
    """Adds up the processor time spent in decoder layers and in the head."""

    def __init__(self, model) -> None:  # type: ignore[no-untyped-def]
        from layerskip.model.anatomy import decoder_layers

        self.seconds, self._start = 0.0, 0.0
        self._handles = []
        for module in (*decoder_layers(model), model.get_output_embeddings()):
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))

    def _enter(self, *_: object) -> None:
        self._start = thread_time()

    def _leave(self, *_: object) -> None:
        self.seconds += thread_time() - self._start

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def peak_of_fresh_process(arm: str) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])["peak_mib"]


def peak_memory(options: argparse.Namespace) -> float:
    """Peak resident memory of this process in MiB while decoding with one arm, the model's own included."""
    import layerskip

    model, prompt = load(options)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    if options.arm == "plain":
        model.generate(prompt, **arguments(options))
    elif options.arm == "self-speculative":
        setting = {"exit_layer": options.exit_layer, "num_draft_tokens": options.num_draft_tokens}
        layerskip.generate(model, prompt, **arguments(options), **setting)
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
