"""A cut model whose every distribution the test writes down, for the real loop to decode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerskip.cache import RollbackCache

Logits = Callable[[tuple[int, ...]], Tensor]  # prefix token ids -> (vocab,) logits of what follows


class ScriptedCache(RollbackCache):
    """Holds the tokens themselves: what the early and the late stage have seen."""

    def __init__(self) -> None:
        self.early: list[int] = []
        self.late: list[int] = []

    @property
    def length(self) -> int:
        assert self.early == self.late, "between rounds both stages must have seen the same tokens"
        return len(self.early)

    def rollback(self, length: int) -> None:
        del self.early[length:], self.late[length:]


class ScriptedStages:
    """Duck-typed `Stages`: draft logits from `draft`, the model's from `target`."""

    exit_layer = 1

    def __init__(self, target: Logits, draft: Logits) -> None:
        self.target, self.draft_logits = target, draft
        self.verified: list[int] = []  # positions of every verify pass

    def prefill(self, token_ids: Tensor, cache: ScriptedCache) -> None:
        cache.early += token_ids[0].tolist()
        cache.late += token_ids[0].tolist()

    def draft(self, token_ids: Tensor, cache: ScriptedCache, with_logits: bool = True):
        cache.early += token_ids[0].tolist()
        hidden = token_ids[..., None].float()  # the token itself, to be checked when verifying
        logits = self.draft_logits(tuple(cache.early))[None, None] if with_logits else None
        return logits, hidden

    def verify(self, token_ids: Tensor, hidden: Tensor, cache: ScriptedCache) -> Tensor:
        assert torch.equal(hidden[..., 0].long(), token_ids), "each position gets its own exit hidden state"
        self.verified.append(token_ids.shape[1])
        rows = []
        for token in token_ids[0].tolist():
            cache.late.append(token)
            rows.append(self.target(tuple(cache.late)))
        return torch.stack(rows)[None]


def random_table(vocab: int, seed: int, sharpness: float = 1.5) -> Logits:
    """Random logits, a fixed function of the prefix."""

    table: dict[tuple[int, ...], Tensor] = {}

    def logits(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in table:
            generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
            table[prefix] = sharpness * torch.randn(vocab, generator=generator)
        return table[prefix]

    return logits
