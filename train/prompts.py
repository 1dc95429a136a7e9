"""Prompts from held-out text, written beside the run for the program `infer` to decode from."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerskip.checkpoint.whole_files import write_whole
from train.bad_rows import BadRowError
from train.disk import writing_alone
from train.splits import Document, hash_share

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from train.chat import ChatTemplate

PROMPTS_PER_SPLIT = 24
PROMPT_TOKENS = 96
_LEAST_TOKENS = 24  # a shorter beginning says too little to go on from
_LOOKAHEAD = 16 * PROMPT_TOKENS  # characters that surely hold PROMPT_TOKENS tokens

# Where a part of a text (a function, a paragraph) begins: after a blank line, not indented.
_PART = re.compile(r"(?<=\n\n)(?=[^\s#)\]}])")


def choose_prompts(
    documents: Iterable[Document],
    tokenizer: "PreTrainedTokenizerBase",
    template: "ChatTemplate | None" = None,
    count: int = PROMPTS_PER_SPLIT,
) -> list[str]:
    """At most `count` prompts of about `PROMPT_TOKENS` tokens: beginnings of documents and of parts of them.

    Every document gives one prompt before any gives a second. The order of the documents is a hash of their
    names, so that the prompts do not all come from the first folder. A conversation gives what `template` makes of
    it up to its last answer, if that is short enough.
    """
    ordered = sorted(documents, key=lambda document: hash_share(document.name))
    per_document = [
        _conversation(document, tokenizer, template) if document.messages else _beginnings(_given(document), tokenizer)
        for document in ordered
    ]
    chosen: dict[str, None] = {}
    for prompts in itertools.zip_longest(*per_document):
        for prompt in prompts:
            if prompt is not None:
                chosen[prompt] = None
            if len(chosen) == count:
                return list(chosen)
    return list(chosen)


def _given(document: Document) -> str:
    """The prompt, if the document is one with its completion; else all of it."""
    return document.text[: document.prompt_length] if document.prompt_length else document.text


def _conversation(
    document: Document, tokenizer: "PreTrainedTokenizerBase", template: "ChatTemplate | None"
) -> Iterator[str]:
    """The rendered prompt of the last answer, without the token that the tokenizer puts before every text itself;
    none if it is longer than `PROMPT_TOKENS`: half of it would be another question."""
    assert template is not None
    try:
        prompt = template.prompt(document.messages)
    except BadRowError:
        return
    if tokenizer.bos_token and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        prompt = prompt.removeprefix(tokenizer.bos_token)
    if len(tokenizer(prompt, verbose=False)["input_ids"]) <= PROMPT_TOKENS:
        yield prompt


def _beginnings(text: str, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """The text's own beginning, then those of its parts, each cut after `PROMPT_TOKENS` tokens."""
    for start in itertools.chain([0], (match.start() for match in _PART.finditer(text))):
        ids = tokenizer(text[start : start + _LOOKAHEAD], add_special_tokens=False)["input_ids"]
        if len(ids) > _LEAST_TOKENS:
            # The last token may end inside a character: its bytes alone decode to U+FFFD.
            yield str(tokenizer.decode(ids[:PROMPT_TOKENS])).rstrip("\ufffd")


def write_prompts(prompts: Iterable[str], path: Path) -> None:
    """Write one `{"prompt": text}` a line. Raises `LocalError` if it cannot be written."""
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts]
    with writing_alone(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines))
