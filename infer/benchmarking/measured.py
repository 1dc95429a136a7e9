"""What the calls of one arm brought, and how they compare with another's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from torch import Tensor

from infer.benchmarking.arms import Arm, Output
from infer.benchmarking.latency import Timing
from layerskip.decode.stats import Statistics


@dataclass(frozen=True)
class Failure:
    """A call that brought nothing."""

    repeat: int
    prompt: int
    reason: str
    timed_out: bool = False


@dataclass
class Measured:
    """An arm and what its calls brought.

    Attributes:
        outputs: outputs[repeat][prompt]; None where the call failed.
        failures: why, for each None.
        warm_up: the first call, short and not counted: compiling, choosing kernels, filling caches.
        error: why there are no outputs at all.
    """

    arm: Arm
    outputs: list[list[Output | None]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    warm_up: Output | None = None
    error: str | None = None

    @property
    def calls(self) -> list[Output]:
        """Those that came to their end."""
        return [output for output in chain.from_iterable(self.outputs) if output is not None]

    @property
    def timings(self) -> list[Timing]:
        """When the tokens of the calls came; those that handed nothing out are left out."""
        return [output.timing for output in self.calls if output.timing is not None]

    @property
    def num_tokens(self) -> int:
        """New tokens of all calls."""
        return sum(len(output.tokens) for output in self.calls)

    @property
    def seconds(self) -> float:
        """Wall time of all calls."""
        return sum(output.seconds for output in self.calls)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same after the first burst of each call, so without prefill; None where nothing came after it."""
        return _decode_rate(self.timings)

    @property
    def statistics(self) -> Statistics | None:
        """Sums over all calls; None if the arm does not count."""
        total = Statistics()
        for output in self.calls:
            if output.statistics is None:
                return None
            total.merge(output.statistics)
        return total

    @property
    def peak_bytes(self) -> int | None:
        """Most GPU memory that any call used."""
        return max((output.peak_bytes for output in self.calls if output.peak_bytes is not None), default=None)

    def longest(self, prompts: Sequence[Tensor]) -> int:
        """Most positions that the cache of a sequence held: of prompt and output, all but the last."""
        pairs = (zip(prompts, row, strict=True) for row in self.outputs)
        return max((p.shape[1] + len(o.tokens) - 1 for p, o in chain.from_iterable(pairs) if o is not None), default=0)

    # Ratios are of the calls that both came to their end with: what one of two did not finish tells of neither.

    def speedup(self, baseline: "Measured") -> float | None:
        """Tokens per second over the baseline's."""
        return _ratio(_rate, self._pairs(baseline))

    def decode_speedup(self, baseline: "Measured") -> float | None:
        """Tokens per second after the first burst, over the baseline's."""
        return _ratio(_output_decode_rate, self._pairs(baseline))

    def processor_speedup(self, baseline: "Measured") -> float | None:
        """Tokens per second of processor time, over the baseline's."""
        return _ratio(_processor_rate, self._pairs(baseline))

    def speedup_by_repeat(self, baseline: "Measured") -> list[float]:
        """`speedup` of each repeat alone: their spread is the noise of the machine."""
        ratios = (_ratio(_rate, self._pairs(baseline, repeat=repeat)) for repeat in range(len(self.outputs)))
        return [ratio for ratio in ratios if ratio is not None]

    def speedup_by_prompt(self, baseline: "Measured") -> list[float | None]:
        """`speedup` of each prompt alone; None where none of its calls came to its end with both."""
        return [_ratio(_rate, self._pairs(baseline, prompt=prompt)) for prompt in range(len(self.outputs[0]))]

    def median_speedup(self, baseline: "Measured") -> float | None:
        """Median of `speedup_by_prompt`."""
        ratios = [ratio for ratio in self.speedup_by_prompt(baseline) if ratio is not None]
        return median(ratios) if ratios else None

    def median_decode_speedup(self, baseline: "Measured") -> float | None:
        """Median over prompts of `decode_speedup`."""
        prompts = range(len(self.outputs[0]))
        ratios = (_ratio(_output_decode_rate, self._pairs(baseline, prompt=prompt)) for prompt in prompts)
        return median(found) if (found := [ratio for ratio in ratios if ratio is not None]) else None

    def _pairs(
        self, baseline: "Measured", repeat: int | None = None, prompt: int | None = None
    ) -> list[tuple[Output, Output]]:
        """This arm's and the baseline's output of each call, of one repeat or one prompt if so asked."""
        return [
            (mine, theirs)
            for r, rows in enumerate(zip(self.outputs, baseline.outputs, strict=True))
            for p, (mine, theirs) in enumerate(zip(*rows, strict=True))
            if mine is not None and theirs is not None and repeat in (None, r) and prompt in (None, p)
        ]


def _ratio(rate: Callable[[Sequence[Output]], float | None], pairs: Sequence[tuple[Output, Output]]) -> float | None:
    """The rate of the firsts over that of the seconds."""
    mine, theirs = rate([pair[0] for pair in pairs]), rate([pair[1] for pair in pairs])
    return mine / theirs if mine and theirs else None


def _rate(outputs: Sequence[Output]) -> float | None:
    """Tokens per second."""
    seconds = sum(output.seconds for output in outputs)
    return sum(len(output.tokens) for output in outputs) / seconds if seconds else None


def _processor_rate(outputs: Sequence[Output]) -> float | None:
    timings = [output.timing for output in outputs if output.timing is not None]
    seconds = sum(timing.processor_seconds for timing in timings)
    return sum(timing.num_tokens for timing in timings) / seconds if seconds else None


def _output_decode_rate(outputs: Sequence[Output]) -> float | None:
    return _decode_rate([output.timing for output in outputs if output.timing is not None])


def _decode_rate(timings: Sequence[Timing]) -> float | None:
    """Tokens per second after the first burst."""
    tokens = sum(timing.decode_tokens for timing in timings)
    return tokens / sum(timing.decode_seconds for timing in timings) if tokens else None
