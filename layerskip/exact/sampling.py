"""Logits to distributions, under transformers' own logits processors, position by position.

Target p and draft q pass through the same processors, each position with its own prefix: a repetition
penalty at the third drafted token sees the first two. Distributions are float32 and are what is sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from layerskip.exact.rules import BlockVerification, Coupled, Greedy, Rejection, Rule

ACCEPTANCES = ("rejection", "block", "coupled")

# Processors that never look at the prefix: all positions may pass through them in one call. Compared by exact
# type, since a subclass may look.
_PREFIX_FREE = {
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(logits_process, name)
}

# Processors that keep a state of their own between calls and so cannot be asked about positions that are
# rejected later.
_STATEFUL = {
    getattr(logits_process, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
    )
    if hasattr(logits_process, name)
}


@dataclass(frozen=True)
class Sampler:
    """How the tokens of a row are chosen from logits; the same object serves draft and target.

    Attributes:
        processors: transformers' logits processors in the order `generate` gives them.
        do_sample: draw from the distribution; otherwise take its most probable token.
        generator: source of randomness of "rejection" and "block"; None is torch's global one.
        acceptance: rule of sampling: "rejection", "block" or "coupled".
        seeds: of each row of the batch, for "coupled".

    Raises:
        ValueError: if a processor keeps a state that cannot be rolled back, or the rule is unknown.
    """

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    do_sample: bool = False
    generator: torch.Generator | None = None
    acceptance: str = "rejection"
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for processor in self.processors:
            if type(processor) in _STATEFUL:
                raise ValueError(
                    f"{type(processor).__name__} keeps a state that speculation cannot roll back: "
                    "decode with exit_layer=None, or leave it out"
                )
        if self.acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance={self.acceptance!r} is unknown: choose one of {', '.join(ACCEPTANCES)}")
        if self.do_sample and self.acceptance == "coupled" and self.seeds is None:
            raise ValueError("acceptance='coupled' needs a seed")

    @cached_property
    def rule(self) -> Rule:
        if not self.do_sample:
            return Greedy()
        if self.acceptance == "coupled":
            assert self.seeds is not None
            return Coupled(self.seeds)
        return (BlockVerification if self.acceptance == "block" else Rejection)(self.generator)

    @cached_property
    def reads_prefix(self) -> bool:
        """Whether any processor needs to know the tokens before a position."""
        return any(type(processor) not in _PREFIX_FREE for processor in self.processors)

    def process(self, logits: Tensor, prefixes: Callable[[int], Tensor]) -> Tensor:
        """Process (..., n, vocab) logits of one row after another: float32 scores, whose softmax is the distribution.

        Args:
            prefixes: for the i-th of all positions, the (1, length) token ids before what it predicts.
        """
        # A copy even if already float32: some processors write in place, and callers may keep the logits.
        scores = logits.to(torch.float32, copy=bool(self.processors))
        if not self.processors:
            return scores
        flat = scores.view(-1, scores.shape[-1])
        if self.reads_prefix:
            flat = torch.cat([self.processors(prefixes(i), flat[i : i + 1]) for i in range(len(flat))])
        else:
            flat = self.processors(prefixes(0)[:, -1:].expand(len(flat), 1), flat)
        return flat.view(scores.shape)
