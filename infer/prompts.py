"""Prompts to measure on: a set to choose settings with, and another one to report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.errors import InputError

# For models that come without prompts of their own. Every other one is for choosing.
BUILT_IN = (
    "The history of the bicycle begins in the early nineteenth century, when",
    "def binary_search(items, target):\n    ",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "Photosynthesis is the process by which green plants",
    "import json\n\n\ndef load_config(path):\n    ",
    "Dear Sir or Madam,\n\nI am writing to you about",
    "The three laws of thermodynamics can be summarised as follows:",
    "class Stack:\n    def __init__(self):\n        ",
    "To make a simple tomato soup, first",
    "In computer science, a hash table is",
    "Question: What is the capital of France?\nAnswer:",
    "The ship had been at sea for forty days when the captain",
)


@dataclass(frozen=True)
class Prompts:
    """Texts to decode from.

    Attributes:
        validation: those that settings are chosen with; may be empty.
        test: those whose numbers are reported; none of them is in `validation`.
        source: where they come from, in words.
    """

    validation: tuple[str, ...]
    test: tuple[str, ...]
    source: str


def find_prompts(file: str | None, model_folder: Path | None, need_validation: bool) -> Prompts:
    """The prompts of `file` if given, else those that training left beside the model, else the built-in ones.

    A single set is dealt out alternately where settings must be chosen, and all for reporting where not.

    Raises:
        InputError: if a file cannot be read or holds too few prompts.
    """
    if file is None and model_folder is not None:
        paths = [model_folder / "prompts" / f"{split}.jsonl" for split in ("validation", "test")]
        if all(path.is_file() for path in paths):
            validation, test = (read_prompts(path) for path in paths)
            unseen = tuple(text for text in test if text not in set(validation))
            if not unseen:
                raise InputError(f"{paths[1]} holds no prompt that validation.jsonl has not: give --prompts")
            return Prompts(validation, unseen, "the model's prompts/")
    texts, source = (BUILT_IN, "built in") if file is None else (read_prompts(Path(file)), Path(file).name)
    if not need_validation:
        return Prompts((), texts, source)
    if len(texts) < 2:
        raise InputError(
            f"{file} holds one prompt, but several settings need one to choose with and another to report: "
            "add prompts, or give one setting"
        )
    return Prompts(texts[::2], texts[1::2], source)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The texts of a file of JSON lines, {"prompt": text} or {"text": text}; each once, in order.

    Raises:
        InputError: naming the line that is something else.
    """
    texts = dict.fromkeys(_read_records(path))
    texts.pop("", None)  # as an empty file of a corpus gives
    if not texts:
        raise InputError(f'{path} holds no prompts: write one {{"prompt": "..."}} a line')
    return tuple(texts)


def read_every_prompt(path: Path) -> tuple[str, ...]:
    """All prompts of a file, in order, the same one as often as it is there: the records of a .jsonl file, or the
    lines of any other; blank lines are passed over.

    Raises:
        InputError: naming the line that is no prompt, or an empty one.
    """
    texts = _read_records(path) if path.suffix == ".jsonl" else [line for line in _read_lines(path) if line.strip()]
    if not texts:
        raise InputError(f'{path} holds no prompts: write one a line, in a .jsonl file as {{"prompt": "..."}}')
    if "" in texts:
        raise InputError(f"prompt {texts.index('') + 1} of {path} is empty: give at least one character to continue")
    return tuple(texts)


def _read_records(path: Path) -> list[str]:
    lines = enumerate(_read_lines(path), start=1)
    return [_text(line, f"{path} line {number}") for number, line in lines if line.strip()]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"cannot read prompts from {path}: {reason}") from None


def _text(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError:
        record = None
    text = record.get("prompt", record.get("text")) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where} is not a prompt: write {{"prompt": "..."}} or {{"text": "..."}}')
    return text
