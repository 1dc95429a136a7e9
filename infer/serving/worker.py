"""Requests, the queue they wait in and the worker that answers them: no model, no wall clock, nothing of torch.

What decodes is an `Engine`: a function that is given a batch and the worker. It hands tokens out with `worker.emit`.
If it can take rows into a running batch it asks `worker.join` for them (continuous batching); an engine that does not
ask gets all that waits when it is free again (static batches).
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Protocol

from infer.errors import first_line

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


class Engine(Protocol):
    """What decodes a batch."""

    def __call__(self, batch: Sequence[Request], worker: "Worker") -> None:
        """Decode until every request of the batch, and those that joined it, was emitted to its end."""


class Worker:
    """Answers every request of a queue exactly once, batch by batch, in the thread that calls `run`.

    A request is answered by the `emit` that ends it; by its deadline; or by the engine's failure, which ends the batch
    that it happened in and not the worker.

    Args:
        batch_size: most rows decoded together.
        on_answer: is told every answered request.
    """

    def __init__(
        self,
        engine: Engine,
        queue: RequestQueue,
        batch_size: int,
        on_answer: Callable[[Request], None],
        clock: Clock = perf_counter,
    ) -> None:
        self.engine, self.queue, self.batch_size, self.clock = engine, queue, batch_size, clock
        self._on_answer = on_answer
        self._running: set[Request] = set()

    def run(self) -> None:
        """Until the queue has ended and everything in it is answered. However it ends, the queue is closed, so that
        nobody waits for a worker that is gone."""
        try:
            while self.queue.wait():
                self.serve_waiting()
        finally:
            self.queue.close()

    def serve_waiting(self) -> bool:
        """Answer a batch of those that wait, and who joins it; False if there was nobody to serve."""
        batch = self.join(0)
        if not batch:
            return False
        reason = "the engine ended without answering it"
        try:
            self.engine(batch, self)
        except Exception as error:  # a result of the test: the others must still be answered
            reason = f"{type(error).__name__}: {first_line(error)}"
        for request in sorted(self._running, key=lambda request: request.number):
            self._answer(request, self.clock(), reason)
        return True

    def join(self, going: int) -> list[Request]:
        """For the engine, between two rounds with so many rows: requests to decode as well."""
        joining: list[Request] = []
        while room := self.batch_size - going - len(joining):
            taken, now = self.queue.take(room), self.clock()
            if not taken:
                break
            for request in taken:
                if now > request.deadline:
                    self._time_out(request, now)
                    continue
                request.started = now
                joining.append(request)
        self._running.update(joining)
        return joining

    def emit(self, request: Request, tokens: Sequence[int], ended: bool) -> None:
        """For the engine: the next tokens of a request, and whether they are its last.

        Raises:
            RuntimeError: if the request is not being answered; tokens after its deadline are let go.
        """
        if request.timed_out:
            return
        if request not in self._running:
            raise RuntimeError(f"tokens for request {request.number}, which is not being answered")
        now = self.clock()
        if now > request.deadline:
            self._time_out(request, now)
            return
        if tokens:
            request.tokens += tokens
            request.bursts.append((now, len(tokens)))
        if ended:
            self._answer(request, now)

    def _time_out(self, request: Request, now: float) -> None:
        request.timed_out = True
        self._answer(request, now, f"not answered {request.deadline - request.arrived:g} s after it came")

    def _answer(self, request: Request, now: float, error: str | None = None) -> None:
        request.finished, request.error = now, error
        self._running.discard(request)
        self.queue.answered()
        self._on_answer(request)
