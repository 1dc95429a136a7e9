"""What the model says about a text, in the places that count: what its exits are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from layerskip.training.objective import IGNORE_INDEX


@dataclass(frozen=True)
class TargetText:
    """What the model says about a batch, once for all exits."""

    counted: Tensor  # (batch, length - start) bool, tokens that count
    start: int
    token_ids: Tensor  # (number,) those tokens
    target: Tensor  # (number, vocab) p
    chosen: Tensor  # (number,) its most probable tokens
    warp: Callable[[Tensor], Tensor]
    sampled: bool = False  # what trees are judged by: the text's tokens, or the model's most probable ones

    @classmethod
    def read(
        cls,
        logits: Tensor,
        token_ids: Tensor,
        start: int,
        labels: Tensor | None,
        warp: Callable[[Tensor], Tensor],
        sampled: bool = False,
    ) -> TargetText:
        """From the model's logits (batch, length, vocab) over tokens (batch, length), of which [start:) count but where
        `labels`, (batch, length) as well, is -100."""
        counted = torch.ones_like(token_ids, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
        counted = counted[:, start:]
        p = logits[:, start - 1 : -1][counted].float()  # (number, vocab)
        chosen = p.argmax(-1)
        return cls(counted, start, token_ids[:, start:][counted], warp(p).softmax(-1), chosen, warp, sampled)

    def of(self, logits: Tensor) -> Tensor:
        """The (number, vocab) float32 rows of (batch, length, vocab) that predict what is counted."""
        return logits[:, self.start - 1 : -1][self.counted].float()


def warper(temperature: float, top_p: float) -> Callable[[Tensor], Tensor]:
    """Logits (number, vocab) to those that are sampled from, by transformers' own processors."""
    steps: list[Callable[..., Tensor]] = []
    if temperature != 1:
        steps.append(TemperatureLogitsWarper(float(temperature)))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))

    def warp(logits: Tensor) -> Tensor:
        for step in steps:
            logits = step(None, logits)
        return logits

    return warp


def runs(values: Tensor, counted: Tensor) -> list[Tensor]:
    """The (number, ...) `values` at the true places of `counted` (batch, length), cut wherever a place is left out."""
    rows, columns = counted.nonzero(as_tuple=True)  # (number,) each, row by row
    breaks = (rows.diff() != 0) | (columns.diff() != 1)
    cuts = [0, *(breaks.nonzero().squeeze(1) + 1).tolist(), len(rows)]
    return list(values.cpu().split([last - first for first, last in pairwise(cuts)]))
