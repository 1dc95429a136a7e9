"""The worker that answers requests: no model, no wall clock, nothing of torch.

What decodes is an `Engine`: a function that is given a batch and the worker. It hands tokens out with `worker.emit`.
If it can take rows into a running batch it asks `worker.join` for them (continuous batching); an engine that does not
ask gets all that waits when it is free again (static batches).
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from infer.errors import first_line
from infer.serving.request_queue import Clock, Request, RequestQueue


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
