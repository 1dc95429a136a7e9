"""How long calls take, by the clock that says most on this device."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from layerskip.model.machine import thread_clock_serves


class Stopwatch:
    """Seconds of calls, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # By the wall clock a busy machine once made a forecast of 22x.
        self.clock = thread_time if thread_clock_serves(device) else perf_counter
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and keep how long it took; returns what the call does."""
        start = self.clock()
        result = call(*arguments)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.setdefault(name, []).append(self.clock() - start)
        return result

    def forget(self) -> None:
        """What came until now was to warm up."""
        self.seconds.clear()

    def median(self, name: str) -> float:
        """Seconds of a call."""
        return median(self.seconds[name])

    def table(self, name: str) -> dict[int, float]:
        """The medians of "name 1", "name 2", ... by number."""
        keys = sorted((key for key in self.seconds if key.startswith(f"{name} ")), key=lambda key: int(key.split()[1]))
        return {int(key.split()[1]): self.median(key) for key in keys}
