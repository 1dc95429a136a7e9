"""Run arms side by side, and add up what they brought."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.arms import Arm, Output
from infer.errors import first_line
from layerskip.stats import Statistics

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Protocol:
    """What is run: every arm on every prompt, `repeats` times.

    Attributes:
        prompts: (1, length) token ids each.
        arguments: of `model.generate`, the same for all arms.
        seed: of the sampling; each prompt and repeat has its own from it, the same for all arms.
    """

    prompts: Sequence[Tensor]
    arguments: dict[str, Any]
    repeats: int = 1
    seed: int = 0

    def num_calls(self, num_arms: int) -> int:
        """Calls in all, warm-up included."""
        return num_arms * (1 + self.repeats * len(self.prompts))


@dataclass
class Measured:
    """An arm and its outputs, outputs[repeat][prompt]; `error` says why there are none."""

    arm: Arm
    outputs: list[list[Output]] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all calls."""
        return sum(len(output.tokens) for row in self.outputs for output in row)

    @property
    def seconds(self) -> float:
        """Wall time of all calls."""
        return sum(output.seconds for row in self.outputs for output in row)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def statistics(self) -> Statistics | None:
        """Sums over all calls; None if the arm does not count."""
        total = Statistics()
        for output in (output for row in self.outputs for output in row):
            if output.statistics is None:
                return None
            total.merge(output.statistics)
        return total

    @property
    def peak_bytes(self) -> int | None:
        """Most GPU memory that any call used."""
        peaks = [output.peak_bytes for row in self.outputs for output in row if output.peak_bytes is not None]
        return max(peaks, default=None)

    def longest(self, prompts: Sequence[Tensor]) -> int:
        """Most positions that the cache of a sequence held: of prompt and output, all but the last."""
        pairs = [
            (prompt.shape[1], len(o.tokens)) for row in self.outputs for prompt, o in zip(prompts, row, strict=True)
        ]
        return max((length + new - 1 for length, new in pairs), default=0)

    def speedup(self, baseline: "Measured") -> float:
        """Tokens per second over the baseline's."""
        return self.tokens_per_second / baseline.tokens_per_second

    def speedup_by_repeat(self, baseline: "Measured") -> list[float]:
        """The same for each repeat alone: their spread is the noise of the machine."""
        return [_speed(mine) / _speed(theirs) for mine, theirs in zip(self.outputs, baseline.outputs, strict=True)]

    def median_speedup(self, baseline: "Measured") -> float:
        """Median over prompts of the baseline's time per token over this arm's."""
        pairs = zip(zip(*self.outputs, strict=True), zip(*baseline.outputs, strict=True), strict=True)
        return median(_speed(mine) / _speed(theirs) for mine, theirs in pairs)


def measure(
    model: PreTrainedModel, arms: Sequence[Arm], protocol: Protocol, advance: Callable[[str], None]
) -> list[Measured]:
    """Run all arms on a prompt before the next prompt, so that a slow spell of the machine hits them alike.

    An arm that fails is left out from there on, and says why. Warm-up is one short call an arm, not counted.

    Args:
        advance: is told after every call what ran.
    """
    measured = [Measured(arm) for arm in arms]
    warm_up = {
        **protocol.arguments,
        "max_new_tokens": min(_WARM_UP_TOKENS, protocol.arguments["max_new_tokens"]),
    }
    for entry in measured:
        _call(entry, model, protocol.prompts[0], warm_up, protocol.seed)
        advance(entry.arm.label)
    for repeat in range(protocol.repeats):
        for entry in measured:
            entry.outputs.append([])
        for index, prompt in enumerate(protocol.prompts):
            seed = protocol.seed + repeat * len(protocol.prompts) + index
            for entry in _rotated(measured, repeat + index):
                output = _call(entry, model, prompt, protocol.arguments, seed)
                if output is not None:
                    entry.outputs[-1].append(output)
                advance(entry.arm.label)
    return measured


def best(measured: Sequence[Measured]) -> Measured | None:
    """The fastest of those that did not fail."""
    running = [entry for entry in measured if entry.error is None]
    return max(running, key=lambda entry: entry.tokens_per_second, default=None)


def _call(
    entry: Measured, model: PreTrainedModel, prompt: Tensor, arguments: dict[str, Any], seed: int
) -> Output | None:
    if entry.error is not None:
        return None
    torch.manual_seed(seed)
    try:
        return entry.arm.run(model, prompt, arguments)
    except Exception as error:  # another's decoding may fail in any way on some architecture: that is a result
        entry.error = f"{type(error).__name__}: {first_line(error)}"
        return None


def _rotated(entries: Sequence[Measured], by: int) -> list[Measured]:
    """Who goes first changes, since who follows finds warm caches."""
    by %= len(entries)
    return [*entries[by:], *entries[:by]]


def _speed(outputs: Sequence[Output]) -> float:
    return sum(len(output.tokens) for output in outputs) / sum(output.seconds for output in outputs)
