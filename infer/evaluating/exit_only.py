"""Decoding that ends at an exit: layers [0:E), its adapter and the whole head, as if the later layers were not there.

What the kit's loop does for a whole model (batches, sampling, stops) it does for the exit as well: it is given stages
whose last layer is the exit.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from layerskip.decode.choice import Choice
from layerskip.decode.preparation import prepare_session
from layerskip.model.block import Block
from layerskip.model.cache import RollbackCache
from layerskip.model.stages import Stages


class ExitStages:
    """What the loop asks of `Stages`, answered by layers [0:exit_layer) and their head alone.

    Raises:
        UnsupportedModelError, ValueError: as `Stages` does.
    """

    def __init__(self, model: nn.Module, exit_layer: int) -> None:
        self._stages = Stages(model, exit_layer)
        self.model, self.exit_layer = self._stages.model, exit_layer

    def new_cache(self, capacity: int, limit: int | None = None) -> RollbackCache:
        """For the layers that run."""
        return RollbackCache(self.exit_layer, capacity, limit)

    def prefill(self, token_ids: Tensor, cache: RollbackCache) -> None:
        """(batch, n) tokens, for their keys and values alone."""
        self._stages.draft(token_ids, cache)

    def verify(
        self, token_ids: Tensor, hidden: Tensor | None, cache: RollbackCache, block: Block | None = None
    ) -> Tensor:
        """(batch, n) tokens -> the exit's logits (batch, n, vocab)."""
        logits, _ = self._stages.draft(token_ids, cache, token_ids.shape[1], block)
        assert logits is not None
        return logits

    def logits(self, token_ids: Tensor) -> Tensor:
        """(batch, n) tokens of whole texts -> the exit's logits (batch, n, vocab)."""
        return self.verify(token_ids, None, self.new_cache(token_ids.shape[1]))


def generate_at_exit(stages: ExitStages, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """Like `layerskip.generate(stages.model, input_ids, **kwargs)`, but what comes out is the exit's own.

    Args:
        input_ids: (B, width), padded on either side with an `attention_mask=`.

    Returns:
        (B, width + new) token ids; rows that ended earlier are filled up with the padding token, or 0.
    """
    session = prepare_session(stages.model, input_ids, {"exit_layer": None, "num_draft_tokens": 0}, Choice(), **kwargs)
    cache = stages.new_cache(input_ids.shape[1] + 64, session.config.max_length)
    rows: list[list[Tensor]] = [[] for _ in input_ids]
    for step in replace(session, stages=cast(Stages, stages), cache=cache).steps():
        rows[step.row].append(step.tokens[0])
    new = [torch.cat(row) for row in rows]  # (new,) each
    padded = nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=session.config.pad_token_id or 0)
    return torch.cat([input_ids, padded.to(input_ids)], dim=1)
