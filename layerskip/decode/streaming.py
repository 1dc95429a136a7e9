"""stream(): text as it is committed, each piece with the step it came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from layerskip.decode.generation import steps
from layerskip.decode.step import Step


@dataclass(frozen=True)
class Piece:
    """Text that a step completed.

    Attributes:
        text: may be empty, while a character's bytes are not all there.
        step: what was drafted and accepted; None for what is left at the end.
        row: which prompt it continues.
    """

    text: str
    step: Step | None
    row: int = 0


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


def pad_left(rows: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Token ids of unequal lengths as one batch: (B, longest) ids and attention mask, int64, filled up on the left."""
    width = max(len(row) for row in rows)
    ids = [[padding] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)


def stream(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[str] | None = None, **kwargs: Any
) -> Iterator[Piece]:
    """Generate text piece by piece. The pieces of a row joined are its decoded output.

    What ends a row ends its text where plain decoding does, wherever in a block of accepted tokens it stands: an
    end-of-sequence token is not shown, a stop string is, with the rest of the token that completes it.

    Args:
        prompt: text to continue, or several texts, decoded together: the pieces of their rows then come mixed, round
            by round. Or give `input_ids=` (and `attention_mask=`) instead, padded on either side.
        **kwargs: as in `layerskip.generate`.

    Raises:
        ValueError: if there is no prompt, or two kinds, or one is empty.
    """
    if (prompt is None) == ("input_ids" not in kwargs):
        raise ValueError("give either a prompt or input_ids")
    if prompt is not None:
        ids, mask = _encode(tokenizer, [prompt] if isinstance(prompt, str) else prompt)
        device = cast(torch.device, model.device)
        kwargs |= {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if kwargs.get("stop_strings"):
        kwargs.setdefault("tokenizer", tokenizer)
    detokenizers: dict[int, Detokenizer] = {}
    for step in steps(model, **kwargs):
        detokenizer = detokenizers.setdefault(step.row, Detokenizer(tokenizer))
        yield Piece(detokenizer.push(step.tokens[0].tolist()), step, step.row)
    for row, detokenizer in sorted(detokenizers.items()):
        if rest := detokenizer.flush():
            yield Piece(rest, None, row)


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(B, longest) ids and attention mask. Padded here and not by the tokenizer, which may pad on the other side, or
    know no token to pad with."""
    if not prompts:
        raise ValueError("no prompts: give at least one")
    rows = tokenizer(list(prompts))["input_ids"]
    empty = next((number for number, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} is empty: give at least one token, e.g. the tokenizer's bos_token")
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return pad_left(rows, next(token for token in known if token is not None))
