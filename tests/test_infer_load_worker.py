"""The queue, the worker and the arrivals, under a clock of the test's own: no wall time decides anything."""

import random
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from infer.serving.arrivals import Arrivals, ClosedLoop, OpenLoop, SkippingClock, poisson
from infer.serving.level import run_level
from infer.serving.metrics import Objective, percentile, summarize
from infer.serving.request_queue import Request, RequestQueue
from infer.serving.worker import Worker


class Simulation:
    """Time passes when the engine says so; what was planned for a moment happens when it is reached."""

    def __init__(self, round_seconds: float = 1.0, continuous: bool = True, fails: Callable[[], bool] = lambda: False):
        self.now, self._planned = 0.0, []
        self.round_seconds, self.continuous, self.fails = round_seconds, continuous, fails
        self.most_rows = 0

    def at(self, moment: float, act: Callable[[], object]) -> None:
        self._planned.append((moment, len(self._planned), act))
        self._planned.sort()

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self._planned and self._planned[0][0] <= until:
            moment, _, act = self._planned.pop(0)
            self.now = max(self.now, moment)
            act()
        self.now = until

    def engine(self, batch, worker: Worker) -> None:
        """A request of n prompt tokens gets n, the tokens of `expected`, one a round."""
        rows = list(batch)
        while rows:
            self.most_rows = max(self.most_rows, len(rows))
            self.pass_time(self.round_seconds)
            if self.fails():
                raise ValueError("as planned\nand more")
            for request in list(rows):
                worker.emit(request, [expected(request)[len(request.tokens)]], len(request.tokens) + 1 == size(request))
                if request.timed_out or len(request.tokens) == size(request):
                    rows.remove(request)
            if rows and self.continuous:
                rows += worker.join(len(rows))

    def run(self, worker: Worker) -> None:
        while worker.serve_waiting() or self._planned:
            if self._planned and not worker.queue._waiting:
                self.pass_time(max(0.0, self._planned[0][0] - self.now))


def size(request: Request) -> int:
    return len(request.prompt)


def expected(request: Request) -> list[int]:
    return [1000 * request.number + i for i in range(size(request))]


def simulate(arrivals: list[tuple[float, int, float]], batch_size: int, **kwargs) -> tuple[list[Request], Simulation]:
    """Requests of (arrival, tokens, timeout); returns them in the order they were answered in."""
    simulation, queue, answers = Simulation(**kwargs), RequestQueue(), []
    for number, (moment, tokens, timeout) in enumerate(arrivals):
        request = Request(number, (7,) * tokens, moment, moment + timeout)
        simulation.at(moment, partial(queue.submit, request))
    simulation.run(Worker(simulation.engine, queue, batch_size, answers.append, simulation.clock))
    return answers, simulation


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_every_request_is_answered_exactly_once_and_in_turn(seed, continuous):
    draw = random.Random(seed)
    patience = [float("inf"), draw.uniform(2, 30)]
    failing = draw.choice([0.0, 0.05])
    arrivals = sorted(
        (draw.choice([draw.uniform(0, 60), 5.0]), draw.randint(1, 9), draw.choice(patience))
        for _ in range(draw.randint(1, 40))
    )
    batch_size = draw.randint(1, 6)
    answers, simulation = simulate(
        arrivals, batch_size, continuous=continuous, fails=lambda: draw.random() < failing, round_seconds=0.7
    )
    assert sorted(request.number for request in answers) == list(range(len(arrivals)))
    assert simulation.most_rows <= batch_size
    for request in answers:
        if request.error is None:
            assert request.tokens == expected(request)
            assert request.finished == request.bursts[-1][0] <= request.deadline
        else:
            assert request.tokens == expected(request)[: len(request.tokens)]
            assert request.timed_out == (request.error.startswith("not answered "))
            assert request.timed_out or request.error == "ValueError: as planned"
            assert not request.timed_out or request.finished > request.deadline
        assert failing or request.error is None or request.timed_out
        assert request.error is None or failing or arrivals[request.number][2] < float("inf")
    started = [r.started for r in sorted(answers, key=lambda r: r.number) if r.started is not None]
    assert started == sorted(started), "first come, first served"


def test_latency_counts_from_arrival_and_joining_spares_the_wait():
    """Rounds of 1 s. A comes at 0 with ten tokens, B at 2.5 with one: it joins at 3, or waits until 10."""
    arrivals = [(0.0, 10, float("inf")), (2.5, 1, float("inf"))]
    for continuous, ttft in ((True, 1.5), (False, 8.5)):
        by_number = {request.number: request for request in simulate(arrivals, 2, continuous=continuous)[0]}
        assert by_number[1].bursts == [(2.5 + ttft, 1)]
        assert by_number[0].finished == 10.0
        summary = summarize(list(by_number.values()), 11.0, Objective())
        assert summary["median_ttft_ms"] == pytest.approx(1000 * (1 + ttft) / 2)
        assert summary["median_queue_ms"] == pytest.approx(1000 * (ttft - 1) / 2)


def test_a_burst_is_served_in_order_and_full_batches():
    answers, simulation = simulate([(1.0, 3, float("inf"))] * 7, 3, continuous=False)
    assert [request.number for request in answers] == list(range(7))
    assert [request.started for request in answers] == [1.0] * 3 + [4.0] * 3 + [7.0]
    assert simulation.most_rows == 3


def test_who_gives_up_is_an_error_and_does_not_hold_up_the_others():
    """One row: 0 takes 10 s, 1 gives up while it waits, 2 after two of its tokens, 3 has all its time."""
    arrivals = [(0.0, 10, float("inf")), (1.0, 5, 3.0), (2.0, 5, 10.5), (3.0, 2, float("inf"))]
    answers, _ = simulate(arrivals, 1)
    by_number = {request.number: request for request in answers}
    assert [by_number[n].timed_out for n in range(4)] == [False, True, True, False]
    assert by_number[1].tokens == []
    assert by_number[1].started is None
    assert by_number[2].tokens == expected(by_number[2])[:2]
    assert by_number[2].error == "not answered 10.5 s after it came"
    assert by_number[3].bursts == [(14.0, 1), (15.0, 1)]
    summary = summarize(answers, 15.0, Objective())
    assert (summary["completed"], summary["timed_out"], summary["failed"]) == (2, 2, 0)
    assert summary["total_output_tokens"] == 12  # what came too late is not counted


def test_tokens_for_nobody_are_an_error_of_the_batch_alone():
    queue, answers = RequestQueue(), []

    def twice(batch, worker):
        worker.emit(batch[0], [1], True)
        worker.emit(batch[0], [2], True)

    requests = [Request(n, (3,), 0.0) for n in range(2)]
    for request in requests:
        assert queue.submit(request)
    worker = Worker(twice, queue, 2, answers.append, lambda: 0.0)
    assert worker.serve_waiting()
    assert not worker.serve_waiting()
    assert [(request.tokens, request.error is None) for request in answers] == [([1], True), ([], False)]
    assert answers[1].error == "RuntimeError: tokens for request 0, which is not being answered"


def lazy(batch, worker: Worker) -> None:
    """Answers at once, by one token."""
    for request in batch:
        worker.emit(request, [request.number], True)


@pytest.mark.parametrize("level", [ClosedLoop(3), OpenLoop(5000.0)])
def test_a_failing_engine_hangs_nobody(level):
    """The arrivals are a real thread; every other batch fails, or is forgotten."""
    calls = []

    def engine(batch, worker):
        calls.append(len(batch))
        if len(calls) % 3 == 1:
            raise MemoryError
        if len(calls) % 3:
            lazy(batch, worker)

    outcome = run_level(engine, level, [(1,)] * 20, batch_size=2, timeout=600.0)
    assert sorted(request.number for request in outcome.answers) == list(range(20))
    errors = {request.error for request in outcome.answers}
    assert {"MemoryError: MemoryError", None, "the engine ended without answering it"} <= errors
    assert not outcome.interrupted


@pytest.mark.parametrize("level", [ClosedLoop(2), OpenLoop(1e-6)])
def test_ctrl_c_ends_the_thread_and_keeps_what_was_answered(level):
    """In the open loop, the second request would come in eleven days."""

    def engine(batch, worker):
        if batch[0].number >= 6 or isinstance(level, OpenLoop):
            lazy(batch[:1], worker)
            raise KeyboardInterrupt
        lazy(batch, worker)

    outcome = run_level(engine, level, [(1,)] * 20, batch_size=1, timeout=600.0)
    assert outcome.interrupted
    numbers = [request.number for request in outcome.answers]
    assert numbers == (list(range(7)) if isinstance(level, ClosedLoop) else [0])
    assert all(thread.name != "arrivals" for thread in threading.enumerate())


def test_arrivals_that_fail_are_told_and_end_the_test():
    class Broken(ClosedLoop):
        def feed(self, prompts, queue, clock, timeout, seed):
            super().feed(prompts[:3], queue, clock, timeout, seed)
            raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        run_level(lazy, Broken(1), [(1,)] * 9, batch_size=1, timeout=600.0)


def test_a_closed_loop_never_has_more_in_flight():
    most = []

    def engine(batch, worker):
        going = list(batch)
        while going:
            most.append(len(going))
            worker.emit(going.pop(0), [1], True)
            going += worker.join(len(going))

    outcome = run_level(engine, ClosedLoop(3), [(1,)] * 30, batch_size=99, timeout=600.0)
    assert len(outcome.answers) == 30
    assert max(most) <= 3


def test_an_open_loop_arrives_as_planned_whatever_becomes_of_it():
    outcome = run_level(lazy, OpenLoop(2000.0), [(1,)] * 30, batch_size=4, timeout=600.0, seed=3)
    arrived = [request.arrived for request in sorted(outcome.answers, key=lambda request: request.number)]
    assert np.allclose(np.array(arrived) - arrived[0], poisson(2000.0, 30, 3))
    assert all(request.started >= request.arrived for request in outcome.answers)


@pytest.mark.parametrize("rate", [0.1, 0.4, 2.0])
def test_an_open_loop_under_a_clock_that_skips_is_the_textbooks_queue(rate):
    """One server, first come, first served: each starts when it has come and the one before is done (Lindley)."""
    busy = [0.0]

    def engine(batch, worker):
        busy[0] += size(batch[0])  # seconds
        worker.emit(batch[0], expected(batch[0]), True)

    prompts = [(1,) * (1 + n * 7 % 4) for n in range(60)]
    clock = SkippingClock(lambda: busy[0])
    outcome = run_level(engine, OpenLoop(rate), prompts, batch_size=1, timeout=1e9, seed=5, clock=clock)
    free = 0.0
    for request, arrived in zip(outcome.answers, poisson(rate, 60, 5), strict=True):
        assert request.arrived == pytest.approx(arrived)
        assert request.started == pytest.approx(max(arrived, free))
        free = request.started + size(request)
        assert request.finished == pytest.approx(free)


def test_poisson_arrivals_are_a_function_of_the_seed_with_the_rate_and_the_spread_of_a_poisson_process():
    count, rate = 20000, 2.5
    times = poisson(rate, count, 7)
    assert times == poisson(rate, count, 7) != poisson(rate, count, 8)
    assert times[0] == 0
    assert times[:5] == poisson(rate, 5, 7)
    gaps = np.diff(times)
    assert (gaps > 0).all()
    # Exponential: mean and standard deviation 1 / rate, a share e^-1 above the mean; within four standard errors.
    assert abs(gaps.mean() * rate - 1) < 4 / count**0.5
    assert abs(gaps.std() * rate - 1) < 4 * 2**0.5 / count**0.5
    assert abs((gaps > 1 / rate).mean() - np.exp(-1)) < 4 * (np.exp(-1) / count) ** 0.5
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / count**0.5


def test_percentiles_are_numpys():
    draw = random.Random(0)
    for length in (1, 2, 3, 10, 101):
        values = [draw.gauss(0, 1) for _ in range(length)]
        for share in (0.5, 0.95, 0.99):
            assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_metrics_by_hand():
    first = Request(
        0, (1,), 10.0, started=10.5, bursts=[(11.0, 2), (12.0, 1), (13.0, 2)], tokens=[5] * 5, finished=13.0
    )
    second = Request(1, (1,), 11.0, started=11.0, bursts=[(13.5, 1)], tokens=[5], finished=13.5)
    failed = Request(2, (1,), 11.0, started=11.0, bursts=[(12.0, 4)], finished=14.0, error="no")
    summary = summarize([first, second, failed], 4.0, Objective(ttft_ms=1500, tpot_ms=500))
    assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 1, ["no"])
    assert (summary["total_output_tokens"], summary["output_throughput"]) == (6, 1.5)
    assert summary["request_throughput"] == 0.5
    assert summary["request_goodput"] == 0.25  # the second's first token took 2.5 s
    assert (summary["mean_ttft_ms"], summary["median_ttft_ms"], summary["p95_ttft_ms"]) == (1750, 1750, 2425)
    assert summary["p99_tpot_ms"] == 500  # (3 - 1) s over four tokens; a single token has none
    assert summary["mean_itl_ms"] == 1000
    assert summary["mean_e2el_ms"] == 2750
    assert summary["mean_in_flight"] == 1.375
    assert summary["mean_tokens_per_burst"] == 1.5
    assert not Objective()
    assert summarize([first], 4.0, Objective())["request_goodput"] is None
    nothing = summarize([failed], 0.0, Objective())
    assert nothing["output_throughput"] is nothing["p99_ttft_ms"] is None


def test_a_thread_that_dies_ends_its_queue():
    queue = RequestQueue()
    thread = Arrivals(lambda: 1 / 0, queue)
    thread.start()
    assert queue.wait() is False
    thread.join()
    assert isinstance(thread.error, ZeroDivisionError)
    assert queue.submit(Request(0, (1,), 0.0)) is False
