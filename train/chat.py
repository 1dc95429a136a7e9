"""Conversations to tokens, by the tokenizer's own chat template, and which of them the assistant says.

Where the template marks its answers with {% generation %}, the tokenizer tells. Elsewhere it is told by prefixes:
the conversation up to an answer, rendered with the generation prompt, is what the model is given when it decodes;
up to and with the answer, what it must have made of it. The tokens that the second has more are the answer's.
A template that renders earlier turns otherwise once later ones follow fails that test, and then only the last
answer is learnt.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from train.bad_rows import TOO_DEEP, BadRowError
from train.errors import TrainingError, first_line
from train.messages import ASSISTANT, Message, asked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Words that no template holds: whether a mark is right can be read off them.
_QUESTION, _ANSWER = "Quorvex?", "Zanthip."


class Encoded(NamedTuple):
    """A document as tokens."""

    ids: list[int]
    targets: list[bool]  # whether each is learnt


class ChatTemplate:
    """The chat template of one tokenizer, tried before it is trusted."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises `TrainingError` if there is no template, or none of whose answers can be found again."""
        if not getattr(tokenizer, "chat_template", None):
            raise TrainingError(
                "the tokenizer has no chat template, which conversations need: give tokenizer.chat_template (a Jinja "
                "file), a tokenizer that has one, or data.as_chat=false to join prompt and completion as they are"
            )
        self._tokenizer = tokenizer
        self.last_answers_only = 0  # conversations of which only the last answer could be told apart
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._special_tokens = tuple({*tokenizer.all_special_tokens, *added})
        template = tokenizer.get_chat_template()
        self._marks_answers = bool(_GENERATION.search(template)) and self._is_right(by_template=True)
        if not self._marks_answers and not self._is_right(by_template=False):
            raise TrainingError(
                "which tokens are the assistant's cannot be told from this chat template: it has no {% generation %} "
                "marks, and an answer does not follow its rendered prompt; give another by tokenizer.chat_template"
            )
        self.last_answers_only = 0

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Tokens of a conversation; what the assistant says, with its end-of-turn token, is to be learnt.

        Raises `BadRowError` if the template refuses the conversation, or its last answer cannot be told apart.
        """
        encoded = self._by_template(messages) if self._marks_answers else self._by_prefixes(messages)
        if not any(encoded.targets):
            raise BadRowError("has no token that the assistant says")
        return encoded

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model is given before the last answer. Raises `BadRowError` as `encode`."""
        return self.render(asked(messages), add_generation_prompt=True)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises `BadRowError` if the template refuses it."""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt))

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts, which bring their special tokens with them."""
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRowError(f"is refused by the chat template: {first_line(error)}") from None
        except RecursionError:  # transformers walks through all that a message holds
            raise BadRowError(TOO_DEEP) from None

    def _by_template(self, messages: Sequence[Message]) -> Encoded:
        made = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Encoded(list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]])

    def _by_prefixes(self, messages: Sequence[Message]) -> Encoded:
        full = self.render(messages)
        answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
        try:
            spans = [self._span(messages, index, full) for index in answers]
        except BadRowError:
            if len(answers) == 1:
                raise
            spans = [self._span(messages, answers[-1], full)]
            self.last_answers_only += 1
        ids, *parts = self.tokenize([full, *(text for span in spans for text in span)])
        targets = [False] * len(ids)
        for before, through in zip(parts[::2], parts[1::2], strict=True):
            start, end = _common(ids, before), _common(ids, through)
            # Only the token over the border may differ, where the answer's first character joins the prompt's last.
            if start < len(before) - 1 or end < len(through) - 1:
                raise BadRowError("has an answer whose tokens run into its prompt's")
            targets[start:end] = [True] * (end - start)
        return Encoded(ids, targets)

    def _span(self, messages: Sequence[Message], index: int, full: str) -> tuple[str, str]:
        """The text before the answer `index` and the text with it, both beginnings of the `full` one.

        Raises `BadRowError` if they are not.
        """
        before = self.render(messages[:index], add_generation_prompt=True)
        through = self.render(messages[: index + 1])
        # What comes after the end-of-turn token (a line break) the template adds, not the assistant.
        if through.rstrip().endswith(self._special_tokens):
            through = through.rstrip()
        if not (full.startswith(through) and through.startswith(before) and len(before) < len(through)):
            raise BadRowError("has an answer that the chat template does not put after its rendered prompt")
        return before, through

    def _is_right(self, by_template: bool) -> bool:
        """Whether a conversation of known words is marked as it must be, in one of the two ways."""
        messages = [{"role": "user", "content": _QUESTION}, {"role": ASSISTANT, "content": _ANSWER}]
        try:
            ids, targets = self._by_template(messages) if by_template else self._by_prefixes(messages)
        except (BadRowError, AttributeError):  # a tokenizer in Python knows no character offsets
            return False
        said = self._tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target])
        return _ANSWER in said and _QUESTION not in said


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    differs = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differs, min(len(first), len(second)))
