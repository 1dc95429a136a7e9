"""Requests, and the queue they wait in."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

Clock = Callable[[], float]  # seconds, from any beginning


@dataclass(eq=False)
class Request:
    """A prompt to continue, and what became of it. Times are the clock's, in seconds.

    Attributes:
        arrived: when it came; latency counts from here, not from when it was first looked at.
        deadline: when who asked gives up.
        started: when a batch took it.
        bursts: (when, number of tokens) each time that tokens came.
        finished: when it was answered, with all its tokens or with an error.
        error: why it has not all its tokens.
        timed_out: whether it is that the deadline passed: whoever decodes its row may end it.
    """

    number: int
    prompt: tuple[int, ...]
    arrived: float
    deadline: float = float("inf")
    started: float | None = None
    bursts: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: float | None = None
    error: str | None = None
    timed_out: bool = False

    @property
    def ttft(self) -> float:
        """From its arrival to its first tokens."""
        return self.bursts[0][0] - self.arrived

    @property
    def e2el(self) -> float:
        """From its arrival to its answer."""
        assert self.finished is not None
        return self.finished - self.arrived

    @property
    def tpot(self) -> float | None:
        """(E2EL - TTFT) / (tokens - 1); None for a single token."""
        return (self.e2el - self.ttft) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """From each burst of tokens to the next: ITL."""
        return [after - before for (before, _), (after, _) in pairwise(self.bursts)]


class RequestQueue:
    """First come, first served, between a thread that submits and one that takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._in_flight = 0  # submitted and not yet answered
        self._ended = False

    def submit(self, request: Request) -> bool:
        """Put a request behind the others; False if the queue was closed, and it is not taken."""
        with self._changed:
            if self._ended:
                return False
            self._waiting.append(request)
            self._in_flight += 1
            self._changed.notify_all()
            return True

    def take(self, most: int) -> list[Request]:
        """Up to `most` of those that wait, at once."""
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def answered(self) -> None:
        """One request less is in flight."""
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing will be submitted any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """End, and forget those that wait: nobody will take them."""
        with self._changed:
            self._waiting.clear()
            self.end()

    def wait(self) -> bool:
        """Until a request waits (True), or none will ever (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return bool(self._waiting)

    def wait_for_room(self, most: int) -> bool:
        """Until fewer than `most` requests are in flight; False if the queue was closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight < most or self._ended)
            return not self._ended

    def sleep(self, seconds: float) -> bool:
        """So long, or until the queue is closed: then False."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._ended, timeout=max(0.0, seconds))
