"""Files of prompts: lines of text, or JSON lines of four kinds."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.errors import InputError
from infer.files import read_text


@dataclass(frozen=True)
class Prompt:
    """What a model is asked.

    Attributes:
        text: to be continued as it is; empty in a conversation.
        messages: a conversation so far, (role, content) each, up to where the model's answer begins.
        turns: what the user says after that answer, one after the other, the answers so far between them.
        category: what kind of task it is, if that is known.
        question_id: its name in the file it is from.
        where: file and line.
    """

    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    category: str | None = field(default=None, compare=False)
    question_id: int | str | None = field(default=None, compare=False)
    where: str = field(default="", compare=False)

    @property
    def as_text(self) -> str:
        """The text, or what was said in the conversation so far, a line each."""
        return self.text or "\n".join(content for _, content in self.messages)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.text and not all([self.messages, *(content for _, content in self.messages), *self.turns])


def read_prompts(path: Path, left_out: list[str] | None = None) -> tuple[Prompt, ...]:
    """The prompts of a file of JSON lines, in order: {"prompt": text} or {"text": text} to be continued, {"messages":
    [{"role", "content"}, ...]} to be answered, or {"turns": [text, ...]} as in Spec-Bench's question file; any of them
    with a "category" and a "question_id".

    Args:
        left_out: gets a line for each empty prompt and each that was there before, which are not returned.

    Raises:
        InputError: naming the line that is something else.
    """
    found: dict[Prompt, Prompt] = {}
    left_out = [] if left_out is None else left_out
    for prompt in (_prompt(record, where) for record, where in _read_records(path)):
        if prompt.is_empty:
            left_out.append(f"{prompt.where} is empty and left out")
        elif prompt in found:
            left_out.append(f"{prompt.where} repeats {found[prompt].where} and is left out")
        else:
            found[prompt] = prompt
    if not found:
        raise InputError(f'{path} holds no prompts: write one {{"prompt": "..."}} a line')
    return tuple(found)


def read_jsonl_texts(path: Path) -> tuple[str, ...]:
    """The texts of a file of JSON lines, {"prompt": text} or {"text": text}; each once, in order.

    Raises:
        InputError: naming the line that is something else.
    """
    texts = dict.fromkeys(_text(record, where) for record, where in _read_records(path))
    texts.pop("", None)  # as an empty file of a corpus gives
    if not texts:
        raise InputError(f'{path} holds no texts: write one {{"text": "..."}} a line')
    return tuple(texts)


def read_texts(path: Path, way_out: str) -> tuple[str, ...]:
    """The texts of a .jsonl file, each once, or the whole of any other file, for --text.

    Args:
        way_out: what to give instead of an empty file, for the message.

    Raises:
        InputError: if it cannot be read or holds nothing.
    """
    if path.suffix == ".jsonl":
        return read_jsonl_texts(path)
    text = read_text(path, f"--text {path}")
    if not text.strip():
        raise InputError(f"--text {path} is empty: {way_out}")
    return (text,)


def read_every_prompt(path: Path) -> tuple[str, ...]:
    """All prompts of a file, in order, the same one as often as it is there: the records of a .jsonl file, or the
    lines of any other; blank lines are passed over.

    Raises:
        InputError: naming the line that is no prompt, or an empty one.
    """
    if path.suffix == ".jsonl":
        texts = [_text(record, where) for record, where in _read_records(path)]
    else:
        texts = [line for line in _read_lines(path) if line.strip()]
    if not texts:
        raise InputError(f'{path} holds no prompts: write one a line, in a .jsonl file as {{"prompt": "..."}}')
    if "" in texts:
        raise InputError(f"prompt {texts.index('') + 1} of {path} is empty: give at least one character to continue")
    return tuple(texts)


def _read_records(path: Path) -> list[tuple[Any, str]]:
    """What each line says, None where it is no JSON, and where it stands."""
    lines = enumerate(_read_lines(path), start=1)
    return [(_parse(line), f"{path} line {number}") for number, line in lines if line.strip()]


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read_lines(path: Path) -> list[str]:
    return read_text(path, f"prompts from {path}").split("\n")  # not splitlines: JSON may hold other separators


def _text(record: Any, where: str) -> str:
    text = record.get("prompt", record.get("text")) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where} is not a prompt: write {{"prompt": "..."}} or {{"text": "..."}}')
    return text


def _prompt(record: Any, where: str) -> Prompt:
    keys = record if isinstance(record, dict) else {}
    category, question_id = keys.get("category"), keys.get("question_id")
    named: dict[str, Any] = {"where": where, "category": None if category is None else str(category)}
    named["question_id"] = question_id if isinstance(question_id, int | str) else None
    if "turns" in keys:
        turns = keys["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise InputError(f'{where} has no turns: write {{"turns": ["...", "..."]}}, what the user says')
        return Prompt(messages=(("user", turns[0]),), turns=tuple(turns[1:]), **named)
    if "messages" in keys:
        return Prompt(messages=_messages(keys["messages"], where), **named)
    return Prompt(_text(record, where), **named)


def _messages(messages: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Up to the last that is not the model's: with its answer behind them, that is what is asked for."""
    found: list[tuple[str, str]] = []
    for message in messages if isinstance(messages, list) else []:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            found = []
            break
        found.append((role, content))
    while found and found[-1][0] == "assistant":
        found.pop()
    if not found:
        raise InputError(
            f'{where} asks nothing: write {{"messages": [{{"role": "user", "content": "..."}}]}}, contents as text'
        )
    return tuple(found)
