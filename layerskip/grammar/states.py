"""Parser states by prefix: any prefix can be asked for next, and is reached from the nearest one."""

from __future__ import annotations

from typing import Any

from layerskip.model.cache import shared_length

_MAX_STATES = 64  # one for each row of a large batch
_MAX_UNDO = 16  # tokens rolled back in place; a prefix that parts earlier (another row) gets a state of its own


class ParserStates:
    """llguidance's parsers at the prefixes that were asked for last, most recent first.

    A prefix is reached from the one it shares most with: rolling back and advancing costs a few microseconds a
    token, where computing a mask takes 5 to 150 (49,152 tokens, one CPU core).
    """

    def __init__(self, start: Any) -> None:
        self._start = start
        self._states: list[tuple[Any, list[int]]] = []  # (parser, the tokens it has consumed)

    def after(self, output: list[int]) -> Any | None:
        """The parser after `output`, None if no text begins so. It must not be moved."""
        matcher, tokens = self._nearest(output)
        rest = output[len(tokens) :]
        consumed = matcher.try_consume_tokens(rest)  # unlike consume_token, survives an illegal one
        tokens += rest[:consumed]
        return matcher if consumed == len(rest) else None

    def forget(self) -> None:
        """Drop all parsers."""
        self._states.clear()

    def _nearest(self, output: list[int]) -> tuple[Any, list[int]]:
        """A parser that has consumed a prefix of `output`, now the most recent."""
        shared, index = 0, None
        for i, (_, tokens) in enumerate(self._states):
            if index is None or shared_length(tokens, output) > shared:
                shared, index = shared_length(tokens, output), i
        matcher, tokens = self._states[index] if index is not None else (self._start.deep_copy(), [])
        undo = len(tokens) - shared
        if undo > _MAX_UNDO:
            matcher, tokens = matcher.deep_copy(), list(tokens)
        elif index is not None:
            del self._states[index]
        if undo:
            matcher.rollback(undo)
            del tokens[shared:]
        self._states.insert(0, (matcher, tokens))
        del self._states[_MAX_STATES:]
        return matcher, tokens
