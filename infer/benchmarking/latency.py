"""When the tokens of one call come: the same clock for every arm, read where the arm hands its tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, process_time

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class TimedOutError(Exception):
    """A call took longer than it may."""


@dataclass(frozen=True)
class Timing:
    """When the tokens of one call came.

    Attributes:
        seconds: wall time of the whole call.
        bursts: (seconds since the call began, tokens) each time that tokens were handed out; not empty. Plain decoding
            hands out one token at a time, speculation what a round commits.
        processor_seconds: processor time of the whole process, all threads: what others' work on the machine does not
            lengthen much. On a GPU it says little.
    """

    seconds: float
    bursts: tuple[tuple[float, int], ...]
    processor_seconds: float

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(tokens for _, tokens in self.bursts)

    @property
    def first_seconds(self) -> float:
        """TTFT: from the call to its first tokens, so prefill and the first round."""
        return self.bursts[0][0]

    @property
    def seconds_per_token(self) -> float | None:
        """TPOT: (end to end - TTFT) / (tokens - 1); None for a single token."""
        return (self.seconds - self.first_seconds) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one burst and the next."""
        times = [seconds for seconds, _ in self.bursts]
        return [after - before for before, after in pairwise(times)]

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first burst: those that `decode_seconds` brought."""
        return self.num_tokens - self.bursts[0][1]

    @property
    def decode_seconds(self) -> float:
        """Wall time after the first burst: the call without its prefill."""
        return self.seconds - self.first_seconds


class TimingStreamer(BaseStreamer):
    """A streamer that notes when tokens are handed to it; the clock runs from its making.

    Args:
        timeout: seconds after which a call is broken off, at its next tokens; None: never.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._bursts: list[tuple[float, int]] = []
        self._seen_any = False
        self._processor_start = process_time()
        self._start = perf_counter()

    def put(self, value: Tensor) -> None:
        """Note (n,) or (1, n) tokens; transformers' `generate` first puts the prompt, (1, length).

        Raises:
            TimedOutError: once the time is over.
        """
        now = perf_counter() - self._start
        is_prompt = not self._seen_any and value.dim() == 2
        self._seen_any = True
        if not is_prompt:
            self._bursts.append((now, value.numel()))
        if self.timeout is not None and now > self.timeout:
            raise TimedOutError(f"took longer than --timeout {self.timeout:g} seconds")

    def end(self) -> None:
        """Nothing is held back that would have to come out now."""

    def timing(self, seconds: float, num_tokens: int) -> Timing | None:
        """Of a call that has just ended, took so long and kept so many tokens; None if it handed nothing out."""
        processor_seconds = process_time() - self._processor_start
        bursts, left = [], num_tokens
        for when, tokens in self._bursts:
            if kept := min(tokens, left):  # the last draft of transformers' own may be cut after it was handed out
                bursts.append((when, kept))
            left -= kept
        return Timing(seconds, tuple(bursts), processor_seconds) if bursts else None


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 95th percentile (linear between neighbours) and mean; None without values."""
    if not values:
        return None
    found = torch.tensor(values, dtype=torch.float64)
    median, p95 = found.quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    return {"median": round(median, 6), "p95": round(p95, 6), "mean": round(found.mean().item(), 6)}
