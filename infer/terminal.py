"""What a person sees. The only file that knows colours, bars and boxes."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

DRAFTED, OWN = "green", "bold magenta"
_MARKS = {True: "green", False: "magenta", None: ""}
_PIPED_WIDTH = 160  # columns of a table that no terminal limits


class PipeConsole(Console):
    """A console that leaves a closed pipe to the program's door, where rich would exit by itself."""

    def on_broken_pipe(self) -> None:
        """Called by rich when whoever read our output has left."""
        raise BrokenPipeError


class Advance(Protocol):
    """Tells a bar that one more thing is done, and what comes next."""

    def __call__(self, description: str) -> None: ...


class Terminal:
    """Standard output for what was asked for, standard error for what is said about it.

    Args:
        color: show who proposed which part of a text. Colours then come through a pipe as well (`| less -R`).
    """

    def __init__(self, color: bool = False) -> None:
        self.color = color
        self._colored = PipeConsole(force_terminal=True, highlight=False, markup=False)

    def write(self, text: str, drafted: bool = False) -> None:
        """Put a part of a text out at once, as it is: nothing is wrapped, trimmed or added."""
        if self.color and text:
            # As a segment: printed as a text, tabs would become spaces.
            segment = Segment(text, Style.parse(DRAFTED if drafted else OWN))
            self._colored.print(Segments([segment]), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        """End the text that was written."""
        sys.stdout.write("\n")
        sys.stdout.flush()

    def legend(self) -> None:
        """Say what the colours mean, on standard error."""
        console = PipeConsole(stderr=True, force_terminal=True, highlight=False, soft_wrap=True)
        console.print(f"[{DRAFTED}]drafted and accepted[/]  [{OWN}]the model's own (correction or bonus)[/]")

    def note(self, text: str) -> None:
        """A line on standard error."""
        print(text, file=sys.stderr, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        """A table on standard output; the first column is text, the others are numbers. Where the terminal is narrower
        than its numbers, lines are as long as they have to be: a cut number is none."""
        console = PipeConsole(width=self.width, highlight=False, markup=False)
        table = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=bool(index))
        for row in rows:
            table.add_row(*row)
        console.width = max(console.width, console.measure(table, options=console.options.update(width=9999)).minimum)
        console.print(table)

    @property
    def width(self) -> int:
        """Columns of a table on standard output."""
        return PipeConsole(width=None if sys.stdout.isatty() else _PIPED_WIDTH).width

    def marked_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[tuple[str, bool | None]]], caption: str
    ) -> None:
        """A table on standard output whose cells are (text, whether it is right; None: neither), in colour where a
        terminal shows any."""
        console = PipeConsole(width=self.width, highlight=False, markup=False)
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE)
        for column in columns:
            table.add_column(column, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(text, style=_MARKS[right]) for text, right in row))
        console.print(table)

    @contextmanager
    def progress(self, total: int) -> Iterator[Advance]:
        """A bar on standard error while the body runs, if that is a terminal."""
        console = PipeConsole(stderr=True)
        bar = Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TextColumn("left"), TimeRemainingColumn()),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        task = bar.add_task("", total=total)
        with bar:
            yield lambda description: bar.update(task, advance=1, description=description)
