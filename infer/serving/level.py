"""One engine under one level of load: a worker in this thread, arrivals in another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from infer.serving.arrivals import Arrivals, Level, OpenLoop, PlannedQueue, Prompt, SkippingClock
from infer.serving.request_queue import Clock, Request, RequestQueue
from infer.serving.worker import Engine, Worker


@dataclass
class Outcome:
    """What one or more runs of an arm under a level brought."""

    answers: list[Request] = field(default_factory=list)
    seconds: float = 0.0  # from the first arrival to the last answer, of all runs
    interrupted: bool = False

    def merge(self, other: "Outcome") -> None:
        """Add another run."""
        self.answers += other.answers
        self.seconds += other.seconds
        self.interrupted |= other.interrupted


def run_level(
    engine: Engine,
    level: Level,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    timeout: float,
    seed: int = 0,
    on_answer: Callable[[Request], None] = lambda request: None,
    clock: Clock = perf_counter,
) -> Outcome:
    """Put a request for each prompt to a worker in this thread, as the level has them arrive from another thread.

    Ctrl-C ends it with the answers so far. With a clock that skips, an open loop needs no other thread.
    """
    outcome = Outcome()

    def keep(request: Request) -> None:
        outcome.answers.append(request)
        on_answer(request)

    if isinstance(level, OpenLoop) and isinstance(clock, SkippingClock):
        queue: RequestQueue = PlannedQueue(level.plan(prompts, clock(), timeout, seed), clock)
        arrivals = Arrivals(lambda: None, RequestQueue())  # they come by themselves
    else:
        queue = RequestQueue()
        arrivals = Arrivals(partial(level.feed, prompts, queue, clock, timeout, seed), queue)
    arrivals.start()
    try:
        Worker(engine, queue, batch_size, keep, clock).run()
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        queue.close()
        arrivals.join()
    if arrivals.error is not None:
        raise arrivals.error
    if outcome.answers:
        last = max(request.finished for request in outcome.answers if request.finished is not None)
        outcome.seconds = last - min(request.arrived for request in outcome.answers)
    return outcome
