"""Tokens as words that can be seen: blanks and line ends have signs of their own."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


class Words:
    """Words for token ids.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=None)(self._of)

    def _of(self, token_id: int) -> str:
        """The token's text, visible: ` of\\n` is `·of⏎`, a part of a character is the tokenizer's own piece."""
        return visible(self.text(token_id))

    def text(self, token_id: int) -> str:
        """The token's text as it stands in a longer one."""
        piece = self._tokenizer.convert_ids_to_tokens(int(token_id))
        text = self._tokenizer.decode([int(token_id)], clean_up_tokenization_spaces=False)
        if piece is None:  # a row of the head that no token has
            return f"<{token_id}>"
        if not text or "�" in text:
            return str(piece)
        # SentencePiece drops the space that a text begins with.
        return " " + text if piece.startswith("▁") and not text.startswith(" ") else text


def visible(text: str) -> str:
    """`text` in one line of characters that all can be seen."""
    return "".join(_SIGNS.get(sign) or (sign if sign.isprintable() else f"\\x{ord(sign):02x}") for sign in text)
