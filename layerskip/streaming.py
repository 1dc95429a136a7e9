"""stream(): text as it is committed, each piece with the step it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from layerskip.decoding import Step
from layerskip.generation import steps


@dataclass(frozen=True)
class Piece:
    """Text that a step completed.

    Attributes:
        text: may be empty, while a character's bytes are not all there.
        step: what was drafted and accepted; None for what is left at the end.
    """

    text: str
    step: Step | None


class Detokenizer:
    """Token ids to text, as they come: holds back bytes that are not yet a whole character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0  # characters of the current ids that are out

    def push(self, token_ids: list[int]) -> str:
        """Add tokens; return the text that is now certain."""
        self._ids.extend(token_ids)
        text = self._decode()
        if text.endswith("�"):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        if text.endswith("\n"):
            # A clean place to start afresh, so that decoding stays linear. The last token is kept as context:
            # SentencePiece drops the space a text begins with.
            self._ids = self._ids[-1:]
            self._shown = len(self._decode())
        return piece

    def flush(self) -> str:
        """The rest, whole or not."""
        piece = self._decode()[self._shown :]
        self._ids, self._shown = [], 0
        return piece

    def _decode(self) -> str:
        return self.tokenizer.decode(
            self._ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )


def stream(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str | None = None, **kwargs: Any
) -> Iterator[Piece]:
    """Generate text piece by piece. The pieces joined are the decoded output.

    Args:
        prompt: text to continue; or give `input_ids=` (and `attention_mask=`) instead.
        **kwargs: as in `layerskip.generate`.

    Raises:
        ValueError: if there is no prompt, or two.
    """
    if (prompt is None) == ("input_ids" not in kwargs):
        raise ValueError("give either a prompt or input_ids")
    if prompt is not None:
        kwargs |= dict(tokenizer(prompt, return_tensors="pt").to(model.device))
        kwargs.pop("token_type_ids", None)
    if kwargs.get("stop_strings"):
        kwargs.setdefault("tokenizer", tokenizer)
    detokenizer = Detokenizer(tokenizer)
    for step in steps(model, **kwargs):
        yield Piece(detokenizer.push(step.tokens[0].tolist()), step)
    if rest := detokenizer.flush():
        yield Piece(rest, None)
