"""What a round commits, and how it came about: the record that the loop hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.exact.acceptance import Walk
from layerskip.model.rows import Rows
from layerskip.model.tree import Draft


@dataclass(frozen=True)
class Step:
    """What one draft-then-verify round commits to one row.

    Attributes:
        tokens: (1, n) committed token ids, 1 <= n <= num_accepted + 1; fewer than num_accepted + 1 only where a stop
            cut them.
        num_drafted: tokens proposed.
        num_accepted: proposed tokens that the rule accepted.
        draft_seconds: host time of layers [0:E), their head and their sampling. Rows share a round's time evenly.
        verify_seconds: host time of layers [E:L) and the head.
        rollback_seconds: host time of the rule, the stops and the rollback.
        logits: (1, n, vocab) the target's logits at the committed positions, if asked for.
        scores: (1, n, vocab) float32, the same after the logits processors, if asked for.
        row: which row of the batch.
        num_levels: most proposed tokens that could have been accepted: the depth of the tree.
    """

    tokens: Tensor
    num_drafted: int
    num_accepted: int
    draft_seconds: float
    verify_seconds: float
    rollback_seconds: float
    logits: Tensor | None = None
    scores: Tensor | None = None
    row: int = 0
    num_levels: int = 0


def steps_of(
    rows: Rows,
    draft: Draft,
    walk: Walk,
    kept: Sequence[Tensor],
    seconds: tuple[float, float, float],
    outputs: tuple[Tensor, Tensor] | None,
) -> list[Step]:
    """The round's record, one step for each row."""
    if draft.block is None:
        drafted = levels = [draft.tokens.shape[1]] * len(rows)
    else:
        drafted = draft.valid.sum(1).tolist()
        levels = (draft.depths[:, 1:] * draft.valid).max(1).values.tolist() if draft.tokens.shape[1] else drafted
    steps = []
    for row, accepted in enumerate(walk.num_accepted.tolist()):
        kept_outputs: list[Tensor | None] = [None, None]
        if outputs is not None:
            nodes = torch.cat([walk.path.new_zeros(1), walk.path[row, :accepted]])[: kept[row].shape[1]]
            kept_outputs = [_outside(output[row : row + 1, nodes]) for output in outputs]
        steps.append(
            Step(
                tokens=_outside(kept[row]),
                num_drafted=drafted[row],
                num_accepted=accepted,
                draft_seconds=seconds[0] / len(rows),
                verify_seconds=seconds[1] / len(rows),
                rollback_seconds=seconds[2] / len(rows),
                logits=kept_outputs[0],
                scores=kept_outputs[1],
                row=rows.index[row],
                num_levels=levels[row],
            )
        )
    return steps


def _outside(tensor: Tensor) -> Tensor:
    """An ordinary copy: tensors made in inference mode cannot take part in training later."""
    with torch.inference_mode(False):
        return tensor.clone()
