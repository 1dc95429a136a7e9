"""When requests arrive: a closed loop keeps so many in flight, an open loop does not wait for answers."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from infer.serving.request_queue import Clock, Request, RequestQueue

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

    def plan(self, prompts: Sequence[Prompt], start: float, timeout: float, seed: int) -> list[Request]:
        """The requests with their moments, the first at `start`."""
        moments = [start + offset for offset in poisson(self.rate, len(prompts), seed)]
        return [
            Request(n, prompt, at, at + timeout) for n, (prompt, at) in enumerate(zip(prompts, moments, strict=True))
        ]

    def feed(self, prompts: Sequence[Prompt], queue: RequestQueue, clock: Clock, timeout: float, seed: int) -> None:
        for request in self.plan(prompts, clock(), timeout, seed):
            # It has arrived when it was planned: if this thread wakes up late, that is latency too.
            if not queue.sleep(request.arrived - clock()):
                return
            queue.submit(request)


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


class SkippingClock:
    """A clock that can be put forward over time in which nothing happens.

    Args:
        read: seconds of what goes on, for instance of processor time.
    """

    def __init__(self, read: Clock) -> None:
        self._read, self._skipped = read, 0.0

    def __call__(self) -> float:
        return self._read() + self._skipped

    def skip_to(self, moment: float) -> None:
        """Nothing happens until then."""
        self._skipped += max(0.0, moment - self())


class PlannedQueue(RequestQueue):
    """A queue whose requests come by themselves when the clock has passed their moments, without a thread. Where the
    worker would wait for the next one, the clock skips to it."""

    def __init__(self, plan: Sequence[Request], clock: SkippingClock) -> None:
        super().__init__()
        self._plan, self._clock = deque(plan), clock

    def take(self, most: int) -> list[Request]:
        self._let_come()
        return super().take(most)

    def wait(self) -> bool:
        self._let_come()
        if self._plan and not self._waiting:
            self._clock.skip_to(self._plan[0].arrived)
            self._let_come(1)
        return super().wait()

    def _let_come(self, least: int = 0) -> None:
        """Those whose moment has passed, and at least so many."""
        while self._plan and (least > 0 or self._plan[0].arrived <= self._clock()):
            self.submit(self._plan.popleft())
            least -= 1
        if not self._plan:
            self.end()
