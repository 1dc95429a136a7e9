"""The dialogue around a conversation: reads turns and commands, shows answers."""

import sys
from contextlib import closing

from infer.conversation import Conversation
from infer.errors import InputError
from infer.streaming import Splitter
from infer.tally import Tally
from infer.terminal import Terminal

HELP = """/reset   forget the conversation
/stats   speed and acceptance of the last answer and of all
/color   show, or stop showing, which text was drafted
/quit    leave (or Ctrl-D); Ctrl-C stops an answer"""


class Dialogue:
    """Between a person, or a pipe, and a conversation."""

    def __init__(self, conversation: Conversation, terminal: Terminal) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._last: Tally | None = None
        self._all = Tally()
        self._commands = {
            "/reset": self._reset,
            "/stats": self._stats,
            "/color": self._color,
            "/help": self._help,
        }

    def talk(self) -> int:
        """Until /quit or the end of the input; returns the exit code."""
        if self._terminal.color:
            self._terminal.legend()
        while (text := self._read()) is not None and text != "/quit":
            if text in self._commands:
                self._commands[text]()
            elif text.startswith("/"):
                self._terminal.note(f"unknown command {text.split()[0]}; /help lists them")
            elif text:
                self._answer(text)
        return 0

    def _read(self) -> str | None:
        """The next line, or None at the end of the input."""
        interactive = sys.stdin.isatty()
        while True:
            try:
                text = input("> " if interactive else "").strip()
                if not _has_broken_bytes(text):
                    return text
                self._terminal.note("error: the line is not UTF-8 text: convert it")
            except EOFError:
                if interactive:
                    self._terminal.end_line()
                return None
            except KeyboardInterrupt:
                self._terminal.note("\nCtrl-D or /quit leaves")

    def _answer(self, text: str) -> None:
        splitter, tally = Splitter(self._conversation.loaded), Tally()
        try:
            with closing(self._conversation.answer(text)) as pieces:
                for piece in pieces:
                    tally.add(piece)
                    for span in splitter.split(piece):
                        self._terminal.write(span.text, span.drafted)
        except KeyboardInterrupt:
            self._terminal.note("\n(stopped)")
        except InputError as error:
            self._terminal.note(f"error: {error}")
            return
        self._terminal.end_line()
        self._last = tally
        self._all.merge(tally)

    def _reset(self) -> None:
        self._conversation.reset()
        self._terminal.note("(a new conversation)")

    def _stats(self) -> None:
        if self._last is None:
            self._terminal.note("no answer yet")
            return
        self._terminal.note(f"last answer: {self._last.line()}; {self._conversation.prefilled} prompt tokens computed")
        self._terminal.note(f"             {self._last.details()}")
        self._terminal.note(f"all answers: {self._all.line()}")

    def _color(self) -> None:
        self._terminal.color = not self._terminal.color
        if self._terminal.color:
            self._terminal.legend()

    def _help(self) -> None:
        self._terminal.note(HELP)


def _has_broken_bytes(text: str) -> bool:
    """Whether a line was read from bytes that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
