"""What an exit learns from: the labels, the model's own output, at some or all positions, a chunk at a time.

At a vocabulary of 49,000 the logits of one exit weigh as much as eight layers' work and more memory than all of
them. So they never exist whole: a chunk of positions passes through the head, gives its share of the loss and is
forgotten; backward computes it again, unless few positions learn. And an exit may learn from a random part of the
positions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from layerskip.training.randomness import row_uniforms

IGNORE_INDEX = -100
CHUNK_BYTES = 48 * 2**20  # float32 logits of one chunk, about; five times as much exists for a moment
MIN_CHUNK = 256  # positions; fewer would leave a GPU idle
KEPT_SHARE = 0.25  # up to this share of the batch's positions, all exits together, logits are kept for backward

Logits = Callable[[Tensor], Tensor]  # (n, 1, hidden_size) -> (n, 1, vocab)


class Positions(NamedTuple):
    """Where an exit learns in one micro-batch of (batch, length).

    Attributes:
        places: (n,) int64 in the flattened (batch * length); never empty.
        weight: (n,) float32, counted positions each one stands for; 0 where nothing is counted at all.
        targets: (n,) int64 token ids to predict.
        items: divisor of the loss: the counted positions of the whole accumulation window where it is known.
    """

    places: Tensor
    weight: Tensor
    targets: Tensor
    items: Tensor

    def chunks(self, count: int) -> list[Positions]:
        """`count` pieces, each with at least one position (of weight 0 where there are too few)."""
        pieces = zip(self.places.tensor_split(count), self.weight.tensor_split(count), strict=True)
        targets = self.targets.tensor_split(count)
        none = (self.places[:1], self.weight[:1] * 0, self.targets[:1])
        return [
            Positions(*((index, weight, target) if len(index) else none), self.items)
            for (index, weight), target in zip(pieces, targets, strict=True)
        ]


def choose_positions(
    targets: Tensor, share: float, num_items: Tensor | int | None, first_row: int, *key: int | str
) -> Positions:
    """Draw which of the counted positions an exit learns from: in each row `share` of them, at least one.

    Every counted position of a row is as likely as the others and stands for as many as were left out, so the
    expectation of the loss is that over all positions.

    Args:
        targets: (batch, length) token ids, IGNORE_INDEX where not counted.
        share: 0 < share <= 1; at 1 all positions are taken and nothing is drawn.
        num_items: what the sum is divided by; None: the counted positions of this micro-batch.
        first_row, key: the place of the draw, see `row_uniforms`.
    """
    counted = targets != IGNORE_INDEX  # (batch, length)
    items = counted.sum() if num_items is None else torch.as_tensor(num_items, device=targets.device)
    items = items.clamp(min=1)
    weight = torch.ones_like(targets, dtype=torch.float32)
    chosen = counted
    if share < 1:
        batch, length = targets.shape
        uniforms = row_uniforms(length, first_row, batch, *key).to(targets.device)
        rank = uniforms.masked_fill(~counted, 2.0).argsort(dim=1).argsort(dim=1)  # uncounted positions come last
        per_row = counted.sum(dim=1, keepdim=True)  # (batch, 1)
        taken = (per_row * share).ceil().clamp(min=1)
        chosen = counted & (rank < taken)
        weight = weight * (per_row / taken)
    index = chosen.flatten().nonzero().squeeze(1)
    if not len(index):  # no label in the batch: the loss is 0, but every parameter takes part
        return Positions(index.new_zeros(1), weight.new_zeros(1), index.new_zeros(1), items)
    return Positions(index, weight.flatten()[index], targets.flatten()[index], items)


def num_chunks(batch: int, length: int, share: float, vocab_size: int) -> int:
    """Into how many pieces the positions of a micro-batch are cut. A function of shapes alone, so that sharded
    processes, which gather the head's weights each time it is called, call it equally often."""
    rows = batch * min(math.ceil(length * share) + 1, length)
    return max(1, math.ceil(rows / max(MIN_CHUNK, CHUNK_BYTES // (4 * vocab_size))))


def exit_loss(
    hidden: Tensor,
    head: Logits,
    last_logits: Tensor,
    positions: Positions,
    chunks: int,
    *,
    distillation: float,
    temperature: float = 1.0,
    recompute: bool = True,
) -> Tensor:
    """The loss of one exit: a scalar, summed over positions and divided by the items.

    Args:
        hidden: (batch, length, hidden_size) after the exit's last layer.
        head: the model's own final norm and head (and an adapter before them).
        last_logits: (batch, length, vocab) the model's own; no gradient flows into them.
        chunks: in how many pieces to compute it; the result does not depend on it.
        distillation: share of cross-entropy to the model's own distribution, the rest is to the labels.
        temperature: softens both distributions; the loss is multiplied by its square (Hinton et al. 2015, section 2).
        recompute: forget each chunk's logits and compute them again in backward.
    """
    flat = hidden.flatten(0, 1)
    # Held until backward, so only where it is used.
    teacher = last_logits.detach().flatten(0, 1) if distillation > 0 else last_logits.new_empty(0)

    def piece(states: Tensor, part: Positions) -> Tensor:
        logits = head(states[:, None])[:, 0].float()  # (n, vocab)
        losses = (1 - distillation) * F.cross_entropy(logits, part.targets, reduction="none") if distillation < 1 else 0
        if distillation > 0:
            losses = losses + distillation * _to_teacher(logits, teacher[part.places].float(), temperature)
        assert isinstance(losses, Tensor)
        return (losses * part.weight).sum()

    total: Tensor | float = 0.0
    for part in positions.chunks(chunks):
        states = flat[part.places]  # (n, hidden_size)
        if chunks == 1 or not recompute or not torch.is_grad_enabled():
            total = total + piece(states, part)
        else:
            total = total + checkpoint(piece, states, part, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(total, Tensor)
    return total / positions.items


def _to_teacher(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-sum p log q of (n, vocab) logits against the teacher's, times temperature^2: (n,).

    As logsumexp(z) - p z, so that log q never exists; the product outside autocast, which would round it.
    """
    if temperature != 1:
        logits, teacher = logits / temperature, teacher / temperature
    p = teacher.softmax(dim=-1)
    with torch.autocast(logits.device.type, enabled=False):
        expected = torch.bmm(p[:, None], logits[:, :, None])[:, 0, 0]
    return temperature**2 * (logits.logsumexp(dim=-1) - expected)


def reference_loss(last_logits: Tensor, reference: Tensor, positions: Positions) -> Tensor:
    """KL(reference || last layer) at `positions`: a scalar, divided by the items.

    Args:
        last_logits: (batch, length, vocab), with gradient.
        reference: (n, vocab) logits of the original model at the positions.
    """
    log_p = reference.detach().float().log_softmax(dim=-1)
    log_q = last_logits.flatten(0, 1)[positions.places].float().log_softmax(dim=-1)
    return ((log_p.exp() * (log_p - log_q)).sum(dim=-1) * positions.weight).sum() / positions.items
