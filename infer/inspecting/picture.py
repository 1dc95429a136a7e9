"""What each layer would say after each token (the "logit lens"), and what each round drafted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from infer.errors import InputError
from infer.loading import Loaded
from infer.options import DecodingOptions
from infer.speculation import in_flags
from layerskip.checkpoint.settings import Setting
from layerskip.decode.choice import Choice
from layerskip.decode.preparation import prepare_session
from layerskip.model.anatomy import num_layers
from layerskip.model.block import Block
from layerskip.model.cache import RollbackCache
from layerskip.model.exit_reader import ExitReader
from layerskip.model.stages import Stages

TOP = 5  # most probable tokens that are kept of every layer and token


@dataclass(frozen=True)
class Round:
    """One draft-then-verify round.

    Attributes:
        drafted: the tokens proposed at each depth; a chain has one at each.
        num_accepted: how many depths of `tokens` were proposed and accepted.
        tokens: what was committed; the one after the accepted ones is the model's own.
    """

    drafted: tuple[tuple[int, ...], ...]
    num_accepted: int
    tokens: tuple[int, ...]

    @property
    def num_drafted(self) -> int:
        """Tokens proposed, at all depths."""
        return sum(len(level) for level in self.drafted)

    @property
    def rejected(self) -> tuple[tuple[int, ...], ...]:
        """What was proposed by depth from the first that was not accepted on."""
        return self.drafted[self.num_accepted :]


@dataclass(frozen=True)
class Picture:
    """Layers x tokens.

    Attributes:
        token_ids: (T,) the text and its continuation.
        num_prompt: how many of them are the text.
        top_ids: (L, T, TOP) most probable next tokens after layer l + 1 has read token t, best first.
        top_probabilities: (L, T, TOP) float32.
        ranks: (L, T) of the last layer's most probable token in each layer, 1 is the best.
        probabilities: (L, T) float32 of that token.
        settled: (T,) the first layer, counted from 1, from which on the most probable token stays the last layer's.
        rounds: how the continuation was decoded.
    """

    token_ids: Tensor
    num_prompt: int
    top_ids: Tensor
    top_probabilities: Tensor
    ranks: Tensor
    probabilities: Tensor
    settled: Tensor
    rounds: tuple[Round, ...] = ()

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.top_ids)


class WatchedStages:
    """Stages that keep what they were given to verify."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.drafted: list[tuple[tuple[int, ...], ...]] = []  # of each round, by depth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stages, name)

    def verify(
        self, token_ids: Tensor, hidden: Tensor | None, cache: RollbackCache, block: Block | None = None
    ) -> Tensor:
        """As `Stages.verify`, of a single row: (1, 1 + drafted) tokens, the root first."""
        row = token_ids[0].tolist()
        depths = range(len(row)) if block is None else (block.positions[0] - block.positions[0, 0]).tolist()
        levels: list[dict[int, None]] = [{} for _ in range(max(depths))]
        for token, depth in zip(row[1:], list(depths)[1:], strict=True):
            levels[depth - 1][token] = None
        self.drafted.append(tuple(tuple(level) for level in levels))
        return self._stages.verify(token_ids, hidden, cache, block)


def decode_watched(loaded: Loaded, ids: Sequence[int], setting: Setting, options: DecodingOptions) -> list[Round]:
    """Continue the token ids, and keep what each round proposed.

    Raises:
        InputError: if the library refuses the call.
    """
    prompt = torch.tensor([list(ids)], device=loaded.model.device)
    arguments = options.generate_arguments() | {"attention_mask": torch.ones_like(prompt)}
    try:
        session = prepare_session(loaded.model, prompt, vars(setting), Choice(), **arguments)
    except ValueError as error:
        raise InputError(in_flags(error)) from None
    watched = WatchedStages(session.stages)
    steps = list(replace(session, stages=cast(Stages, watched)).steps())
    return [
        Round(drafted, min(step.num_accepted, step.tokens.shape[1]), tuple(step.tokens[0].tolist()))
        for drafted, step in zip(watched.drafted, steps, strict=True)
    ]


def read_layers(loaded: Loaded, ids: Sequence[int]) -> Picture:
    """One pass over the token ids, every layer's hidden states through norm and head, and its adapter where it has one.

    Raises:
        InputError: if the model cannot be cut.
    """
    layers = num_layers(loaded.model)
    token_ids = torch.tensor([list(ids)], device=loaded.model.device)  # (1, T)
    try:
        logits, exits = ExitReader(loaded.model, range(1, layers)).read(token_ids)
    except ValueError as error:
        raise InputError(str(error)) from None
    chosen = logits[0].argmax(-1)  # (T,)
    read = [_layer(early[0], chosen) for _, early in exits]
    read.append(_layer(logits[0], chosen))
    top_ids, top_probabilities, ranks, probabilities = (torch.stack(parts) for parts in zip(*read, strict=True))
    # How many layers, counted from the last one, say in a row what the last one says.
    agreeing = (top_ids[..., 0] == chosen.cpu()).flip(0).long().cumprod(0).sum(0)  # (T,)
    settled = layers - agreeing + 1
    return Picture(token_ids[0].cpu(), len(ids), top_ids, top_probabilities, ranks, probabilities, settled)


def _layer(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one layer's logits (T, vocab): the best tokens and their probabilities (T, TOP) each, and rank and probability
    (T,) each of the last layer's choice."""
    p = logits.float().softmax(-1)
    values, indices = p.topk(min(TOP, p.shape[-1]), dim=-1)
    # The best of equals is the one that argmax takes.
    indices[:, 0] = logits.argmax(-1)
    own = p.gather(1, chosen[:, None])  # (T, 1)
    ranks = (p > own).sum(-1) + 1
    return indices.cpu(), values.cpu(), ranks.cpu(), own[:, 0].cpu()
