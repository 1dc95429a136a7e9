"""A cut model whose every distribution the test writes down, for the real loop to decode: rows, chains and trees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerskip.draft.adaptive import Adaptive
from layerskip.draft.exits import KnownExit
from layerskip.draft.prospect import Prospect
from layerskip.draft.round_times import RoundTimes
from layerskip.model.block import Block
from layerskip.model.cache import RollbackCache

Logits = Callable[[tuple[int, ...]], Tensor]  # prefix token ids -> (vocab,) logits of what follows


class ScriptedCache(RollbackCache):
    """Holds the tokens themselves, slot by slot: what the early and the late stage have seen of each row."""

    def __init__(self, batch: int = 1) -> None:
        self.early: list[list[int | None]] = [[] for _ in range(batch)]
        self.late: list[list[int | None]] = [[] for _ in range(batch)]

    @property
    def length(self) -> int:
        assert self.early == self.late, "between rounds both stages must have seen the same tokens"
        return len(self.early[0])

    def rollback(self, length: int) -> None:
        for stage in (self.early, self.late):
            for row in stage:
                del row[length:]

    def select(self, rows: Tensor) -> None:
        self.early = [self.early[row] for row in rows.tolist()]
        self.late = [self.late[row] for row in rows.tolist()]

    def move(self, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
        for stage in (self.early, self.late):
            for row, source, target in zip(rows.tolist(), sources.tolist(), targets.tolist(), strict=True):
                copied = [stage[row][slot] if slot < len(stage[row]) else None for slot in source]
                for token, slot in zip(copied, target, strict=True):
                    if slot < len(stage[row]):
                        stage[row][slot] = token


class ScriptedStages:
    """Duck-typed `Stages`: draft logits from `draft`, the model's from `target`."""

    exit_layer = 1

    def __init__(self, target: Logits, draft: Logits) -> None:
        self.target, self.draft_logits = target, draft
        self.verified: list[int] = []  # positions of every verify pass

    def prefill(self, token_ids: Tensor, cache: ScriptedCache) -> None:
        for stage in (cache.early, cache.late):
            for row, tokens in zip(stage, token_ids.tolist(), strict=True):
                row += tokens

    def draft(self, token_ids: Tensor, cache: ScriptedCache, logits_to_keep: int = 0, block: Block | None = None):
        prefixes = see(cache.early, token_ids, block)
        hidden = token_ids[..., None].float()  # the token itself, to be checked when verifying
        if not logits_to_keep:
            return None, hidden
        return torch.stack(
            [torch.stack([self.draft_logits(p) for p in row[-logits_to_keep:]]) for row in prefixes]
        ), hidden

    def verify(
        self, token_ids: Tensor, hidden: Tensor | None, cache: ScriptedCache, block: Block | None = None
    ) -> Tensor:
        if hidden is None:
            see(cache.early, token_ids, block)
        else:
            assert torch.equal(hidden[..., 0].long(), token_ids), "each position gets its own exit hidden state"
        self.verified.append(token_ids.shape[1])
        prefixes = see(cache.late, token_ids, block)
        return torch.stack([torch.stack([self.target(prefix) for prefix in row]) for row in prefixes])


def see(stage: list[list[int | None]], token_ids: Tensor, block: Block | None) -> list[list[tuple[int, ...]]]:
    """Write tokens into a stage's slots; what each of them then sees, itself last."""
    seen = []
    for row, tokens in enumerate(token_ids.tolist()):
        slots = (
            list(range(len(stage[row]), len(stage[row]) + len(tokens))) if block is None else block.slots[row].tolist()
        )
        stage[row] += [None] * (max(slots) + 1 - len(stage[row]))
        for slot, token in zip(slots, tokens, strict=True):
            stage[row][slot] = token
        prefixes = []
        for i, slot in enumerate(slots):
            visible = range(slot + 1) if block is None else block.visible[row, i].nonzero()[:, 0].tolist()
            prefix = [stage[row][j] for j in visible]
            assert None not in prefix, "a slot is seen that nobody wrote"
            if block is not None:
                assert block.slot_positions[row, visible].tolist() == list(range(len(prefix))), "positions are depths"
            prefixes.append(tuple(prefix))
        seen.append(prefixes)
    return seen


def random_table(vocab: int, seed: int, sharpness: float = 1.5) -> Logits:
    """Random logits, a fixed function of the prefix."""

    table: dict[tuple[int, ...], Tensor] = {}

    def logits(prefix: tuple[int, ...]) -> Tensor:
        if prefix not in table:
            generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
            table[prefix] = sharpness * torch.randn(vocab, generator=generator)
        return table[prefix]

    return logits


def adaptive(most: int, exits: tuple[int, ...] = (1,), acceptance: float = 0.6, trained: bool = True) -> Adaptive:
    """Weighs chains of a model of ten layers and a head that costs one; passes without the head save that."""
    weights = {("plain",): 11.0}
    for e in exits:
        weights |= {("draft", e): e + 1.0, ("verify", e): 11.0 - e}
    known = [KnownExit(e, acceptance, acceptance, trained) for e in exits]
    return Adaptive(
        most, [Prospect(k, acceptance, k.exit_layer / (k.exit_layer + 1), most) for k in known], RoundTimes(weights)
    )
