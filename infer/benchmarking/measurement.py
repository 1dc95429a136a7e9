"""Run arms side by side: who goes when, what is warmed up, what becomes of a call that fails."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.benchmarking.arms import Arm, Output
from infer.benchmarking.latency import TimedOutError, TimingStreamer
from infer.benchmarking.measured import Failure, Measured
from infer.errors import first_line

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Protocol:
    """What is run: every arm on every prompt, `repeats` times.

    Attributes:
        prompts: (1, length) token ids each.
        arguments: of `model.generate`, the same for all arms.
        seed: of the sampling; each prompt and repeat has its own from it, the same for all arms.
        timeout: seconds that a call may take, warm-up apart; None: any.
    """

    prompts: Sequence[Tensor]
    arguments: dict[str, Any]
    repeats: int = 1
    seed: int = 0
    timeout: float | None = None

    def num_calls(self, num_arms: int) -> int:
        """Calls in all, warm-up included."""
        return num_arms * (1 + self.repeats * len(self.prompts))


def measure(
    model: PreTrainedModel, arms: Sequence[Arm], protocol: Protocol, advance: Callable[[str], None]
) -> list[Measured]:
    """Run all arms on a prompt before the next prompt, so that a slow spell of the machine hits them alike.

    Warm-up is one short call an arm, not counted; an arm that fails there is left out, and says why. A call that fails
    later, or takes too long, is counted as such, and the others go on.

    Args:
        advance: is told after every call what ran.
    """
    measured = [Measured(arm) for arm in arms]
    _warm_up(measured, model, protocol, advance)
    for repeat in range(protocol.repeats):
        for entry in measured:
            entry.outputs.append([None] * len(protocol.prompts))
        for index, prompt in enumerate(protocol.prompts):
            seed = protocol.seed + repeat * len(protocol.prompts) + index
            for entry in _rotated(measured, repeat + index):
                if entry.error is None:
                    fail = partial(Failure, repeat, index)
                    output = _call(entry.arm, model, prompt, protocol.arguments, seed, protocol.timeout, fail)
                    if isinstance(output, Failure):
                        entry.failures.append(output)
                    else:
                        entry.outputs[repeat][index] = output
                advance(entry.arm.label)
    for entry in measured:
        if entry.error is None and not entry.calls:
            entry.error = entry.failures[0].reason
    return measured


def best(measured: Sequence[Measured]) -> Measured | None:
    """The fastest of those that did not fail."""
    running = [entry for entry in measured if entry.error is None]
    return max(running, key=lambda entry: entry.tokens_per_second, default=None)


def _warm_up(
    measured: Sequence[Measured], model: PreTrainedModel, protocol: Protocol, advance: Callable[[str], None]
) -> None:
    few = min(_WARM_UP_TOKENS, protocol.arguments["max_new_tokens"])
    arguments = {**protocol.arguments, "max_new_tokens": few}
    longest = max(protocol.prompts, key=lambda prompt: prompt.shape[1])
    for entry in measured:
        # What is compiled for the longest call is not compiled anew in a shorter one.
        prompt, given = (longest, protocol.arguments) if entry.arm.compiles else (protocol.prompts[0], arguments)
        output = _call(entry.arm, model, prompt, given, protocol.seed, None, partial(Failure, 0, 0))
        if isinstance(output, Failure):
            entry.error = output.reason
        else:
            entry.warm_up = output
        advance(entry.arm.label)


def _call(
    arm: Arm,
    model: PreTrainedModel,
    prompt: Tensor,
    arguments: dict[str, Any],
    seed: int,
    timeout: float | None,
    fail: Callable[..., Failure],
) -> Output | Failure:
    torch.manual_seed(seed)
    streamer = TimingStreamer(timeout)
    try:
        output = arm.run(model, prompt, {**arguments, "streamer": streamer})
    except TimedOutError as error:
        return fail(str(error), timed_out=True)
    except Exception as error:  # another's decoding may fail in any way on some architecture: that is a result
        return fail(f"{type(error).__name__}: {first_line(error)}")
    return replace(output, timing=streamer.timing(output.seconds, len(output.tokens)))


def _rotated(entries: Sequence[Measured], by: int) -> Iterator[Measured]:
    """Who goes first changes, since who follows finds warm caches."""
    by %= len(entries)
    return chain(entries[by:], entries[:by])
