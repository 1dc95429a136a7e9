"""Ctrl-C, SIGTERM and a launcher that has gone: the step in hand is finished and saved first."""

import os
import signal
import time
from types import FrameType, TracebackType

# torchrun sends on to its processes the Ctrl-C that the terminal gave them already: that is not a second one.
_ECHO_SECONDS = 3.0
_listening: "list[Interrupts]" = []  # those that are entered


class Interrupts:
    """While entered, the first SIGINT or SIGTERM only sets `signal`; a second one, some seconds later, acts at once.

    `accelerate launch` with one process does not pass a SIGTERM on to it: when that launcher has died, `poll`
    takes it for a SIGTERM.
    """

    def __init__(self) -> None:
        self.signal = 0  # number of the signal received; 0: none
        self._received = 0.0  # when, in seconds of the monotonic clock
        self._before: dict[int, object] = {}
        self._parent = os.getppid()
        self._launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # set by every accelerate launcher

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        _listening.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        _listening.remove(self)
        self._restore()

    def poll(self) -> int:
        """The signal to stop for, 0 if there is none."""
        if not self.signal and self._launched and os.getppid() != self._parent:
            self.signal = signal.SIGTERM
        return int(self.signal)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._received = number, time.monotonic()
        elif time.monotonic() - self._received > _ECHO_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()


def ask_to_stop() -> None:
    """Have the run stop as a first SIGTERM does: the step in hand is finished and saved. Nothing if no run listens."""
    for interrupts in _listening:
        if not interrupts.signal:
            signal.raise_signal(signal.SIGTERM)
