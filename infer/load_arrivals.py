"""When requests arrive: a closed loop keeps so many in flight, an open loop does not wait for answers."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from infer.load_worker import Clock, Request, RequestQueue

Prompt = tuple[int, ...]  # token ids


class Level(Protocol):
    """How much load."""

    @property
    def label(self) -> str:
        """For people."""
        ...

    @property
    def record(self) -> dict[str, Any]:
        """For JSON, in the names of vLLM's `bench serve`."""
        ...

    def feed(self, prompts: Sequence[Prompt], queue: RequestQueue, clock: Clock, timeout: float, seed: int) -> None:
        """Submit a request for each prompt, in order, each giving up `timeout` seconds after it arrived; ends early if
        the queue is closed."""


@dataclass(frozen=True)
class ClosedLoop:
    """The next request comes when one is answered: `concurrency` clients, each of which waits for its answer."""

    concurrency: int

    @property
    def label(self) -> str:
        return f"{self.concurrency} in flight"

    @property
    def record(self) -> dict[str, Any]:
        return {"max_concurrency": self.concurrency, "request_rate": None}

    def feed(self, prompts: Sequence[Prompt], queue: RequestQueue, clock: Clock, timeout: float, seed: int) -> None:
        for number, prompt in enumerate(prompts):
            if not queue.wait_for_room(self.concurrency):
                return
            arrived = clock()
            queue.submit(Request(number, prompt, arrived, arrived + timeout))


@dataclass(frozen=True)
class OpenLoop:
    """A Poisson process: `rate` requests a second on average, whatever has become of those before."""

    rate: float

    @property
    def label(self) -> str:
        return f"{self.rate:g} requests/s"

    @property
    def record(self) -> dict[str, Any]:
        return {"max_concurrency": None, "request_rate": self.rate}

    def feed(self, prompts: Sequence[Prompt], queue: RequestQueue, clock: Clock, timeout: float, seed: int) -> None:
        start = clock()
        for number, (prompt, offset) in enumerate(zip(prompts, poisson(self.rate, len(prompts), seed), strict=True)):
            arrived = start + offset  # as planned: if this thread wakes up late, that is latency too
            if not queue.sleep(arrived - clock()):
                return
            queue.submit(Request(number, prompt, arrived, arrived + timeout))


def poisson(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Seconds at which `count` requests arrive, the first at 0: a function of its arguments alone. The gaps are
    independent, exponential, 1 / rate on average."""
    draw = random.Random(seed)
    return tuple(accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0))


class Arrivals(threading.Thread):
    """Runs `feed` and then ends the queue, whatever happens; `error` is what went wrong."""

    def __init__(self, feed: Callable[[], None], queue: RequestQueue) -> None:
        super().__init__(name="arrivals", daemon=True)
        self._feed, self._queue = feed, queue
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._feed()
        except BaseException as error:  # told by the thread that waits for this one
            self.error = error
        finally:
            self._queue.end()
