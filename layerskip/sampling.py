"""Logits to distributions, under transformers' own logits processors, position by position.

Target p and draft q pass through the same processors, each position with its own prefix: a repetition
penalty at the third drafted token sees the first two. Distributions are float32 and are what is sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

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
    """How one token is chosen from logits; the same object serves draft and target.

    Attributes:
        processors: transformers' logits processors in the order `generate` gives them.
        do_sample: draw from the distribution; otherwise take its most probable token.
        generator: source of randomness; None is torch's global one.

    Raises:
        ValueError: if a processor keeps a state that cannot be rolled back.
    """

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    do_sample: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for processor in self.processors:
            if type(processor) in _STATEFUL:
                raise ValueError(
                    f"{type(processor).__name__} keeps a state that speculation cannot roll back: "
                    "decode with exit_layer=None, or leave it out"
                )

    @property
    def reads_prefix(self) -> bool:
        """Whether any processor needs to know the tokens before a position."""
        return any(type(processor) not in _PREFIX_FREE for processor in self.processors)

    def scores(self, logits: Tensor, prefix: Tensor, tokens: Tensor) -> Tensor:
        """Process the logits of consecutive positions.

        Args:
            logits: (batch, n, vocab), position i predicts what follows prefix + tokens[:, :i].
            prefix: (batch, length) token ids before the first position's prediction.
            tokens: (batch, >= n-1) token ids between the positions.

        Returns:
            (batch, n, vocab) float32 scores; softmax of them is the distribution.
        """
        # A copy even if already float32: some processors write in place, and callers may keep the logits.
        scores = logits.to(torch.float32, copy=bool(self.processors))
        batch, n, vocab = scores.shape
        if not self.processors:
            return scores
        if not self.reads_prefix:
            rows = prefix[:, -1:].expand(batch, n).reshape(batch * n, 1)
            return self.processors(rows, scores.view(batch * n, vocab)).view(batch, n, vocab)
        whole = torch.cat([prefix, tokens[:, : n - 1]], dim=1)  # (batch, length + n - 1)
        length = prefix.shape[1]
        columns = [self.processors(whole[:, : length + i], scores[:, i]) for i in range(n)]
        return torch.stack(columns, dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """(..., vocab) scores to float32 distributions."""
        return scores.softmax(dim=-1)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pick a token from (batch, vocab) scores.

        Returns:
            tokens (batch, 1), and the distribution (batch, vocab) they were drawn from, None if greedy.
        """
        if not self.do_sample:
            return scores.argmax(dim=-1, keepdim=True), None
        probabilities = self.probabilities(scores)
        return self.draw(probabilities), probabilities

    def draw(self, probabilities: Tensor) -> Tensor:
        """One sample (batch, 1) from each (batch, vocab) distribution, which need not be normalised."""
        return torch.multinomial(probabilities, 1, generator=self.generator)

    def uniforms(self, batch: int, n: int, device: torch.device) -> Tensor:
        """(batch, n) independent uniforms on [0, 1)."""
        return torch.rand(batch, n, device=device, generator=self.generator)
