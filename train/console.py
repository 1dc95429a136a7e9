"""What a person sees of a run: a bar on a terminal, plain lines in a file, tables of evaluations."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_FILE_WIDTH = 110  # characters of a table in a file; a terminal has its own


class Reporter:
    """Prints on the first process, is silent on the others. Use as a context manager around the loop."""

    def __init__(self, enabled: bool, steps: int = 0, done: int = 0) -> None:
        """`steps` optimizer steps in all, of which `done` lie behind."""
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = _FILE_WIDTH
        self._start = time.perf_counter()
        self._done_before, self._steps = done, steps
        columns = (
            *(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=16)),
            *(TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn("left")),
        )
        on_terminal = enabled and self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, disable=not on_terminal)
        self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> "Reporter":
        self._start = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self) -> None:
        """The first step begins: the time left is told from here on, evaluations before it apart."""
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line (above the bar, if there is one)."""
        self._console.print(text, markup=False)

    def advance(self, step: int) -> None:
        """Optimizer step `step` (counted from 1) is done."""
        self._bar.update(self._task, completed=step)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Show the newest numbers: beside the bar on a terminal, as a line elsewhere."""
        loss, rate = f"loss {values['loss']:.3f}", f"{values['tokens_per_second']:,.0f} tokens/s"
        if not self._bar.disable:
            self._bar.update(self._task, description=f"{loss}  {rate}")
            return
        last = f"last layer {values['last']:.3f}  " if "last" in values else ""
        elapsed = time.perf_counter() - self._start
        left = elapsed / max(1, step - self._done_before) * (self._steps - step)
        learning_rate = f"lr {values['learning_rate']:.2e}"
        self.say(f"step {step}/{self._steps}  {loss}  {last}{learning_rate}  {rate}  {_clock(left)} left")

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table, numbers to the right."""
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` things; call what it gives with how many more are done. In a file, a line each tenth."""
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(bar_width=16), TimeRemainingColumn())
    with Progress(*columns, TextColumn("left"), console=console, disable=not console.is_terminal) as bar:
        task, start, done = bar.add_task("", total=total), time.perf_counter(), 0

        def count(more: int) -> None:
            nonlocal done
            tenth = done * 10 // total
            done += more
            bar.update(task, completed=done)
            if bar.disable and done * 10 // total > tenth:
                left = (time.perf_counter() - start) / done * (total - done)
                console.print(f"{what} {done}/{total}  {_clock(left)} left")

        yield count


def _clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
