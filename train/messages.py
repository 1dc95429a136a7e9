"""Conversations as data: lists of {role, content}, checked, before any template sees them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from train.bad_rows import BadRowError, check_characters

Message = Mapping[str, Any]

ASSISTANT = "assistant"


def conversation(value: Any, column: str, role: str | None = None, needs_answer: bool = True) -> tuple[Message, ...]:
    """A column's value as messages; where `role` is given, a lone text is one message of that role.

    Raises `BadRowError` for what is no list of {role, content}, and under `needs_answer` if no assistant speaks;
    messages after the last answer are then left out.
    """
    if isinstance(value, str) and role is not None:
        return (_message({"role": role, "content": value}, 1, column),)
    if isinstance(value, str):  # a list in a .csv is its JSON
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRowError(f"has text in {column!r}, not a list of {{role, content}}") from None
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise BadRowError(f"has {type(value).__name__} in {column!r}, not a list of {{role, content}}")
    messages = tuple(_message(message, number, column) for number, message in enumerate(value, start=1))
    # What is said after the last answer is not learnt and leads to nothing.
    while needs_answer and messages and messages[-1]["role"] != ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise BadRowError(f"has no message {'of an assistant ' if needs_answer else ''}in {column!r}")
    return messages


def _message(message: Mapping[str, Any], number: int, column: str) -> Message:
    """One message without the keys that are None (a table has all keys in every row)."""
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str):
        raise BadRowError(f"has no role in message {number} of {column!r}")
    if not isinstance(kept.get("content", "" if "tool_calls" in kept else None), str):
        raise BadRowError(f"has no text content in message {number} of {column!r}")
    check_characters(_as_json(kept), column)
    return kept


def flatten(messages: Sequence[Message]) -> str:
    """What is said, a paragraph a message: for a tokenizer to be trained on; empty if no answer says anything."""
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if answers and not any(message.get("content", "").strip() for message in answers):
        return ""
    return "\n\n".join(message.get("content", "") for message in messages)


def asked(messages: Sequence[Message]) -> Sequence[Message]:
    """What the model is given: all but the last answer. Raises `BadRowError` if that is nothing."""
    before = messages[:-1] if messages[-1]["role"] == ASSISTANT else messages
    if not before:
        raise BadRowError("has no message before its answer")
    return before


def opening(messages: Sequence[Message]) -> str:
    """Everything before the first answer, as one text: what makes two conversations the same prompt."""
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    before = messages[: answers[0]] if answers else messages
    return _as_json([dict(message) for message in before or messages])


def _as_json(value: object) -> str:
    """One text for equal values, whatever a table holds."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
