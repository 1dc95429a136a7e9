"""A call that is ready to be decoded: everything the loop needs, and nothing left to refuse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig

from layerskip.checkpoint.settings import Setting
from layerskip.decode.decoding import decode
from layerskip.decode.step import Step
from layerskip.decode.stopping import StopRule
from layerskip.draft.drafters import Drafter, drafter_for
from layerskip.draft.remembered import adaptive_for
from layerskip.exact.sampling import Sampler
from layerskip.model.cache import RollbackCache
from layerskip.model.stages import Stages

if TYPE_CHECKING:
    from layerskip.grammar.processor import GrammarProcessor


@dataclass(frozen=True)
class Session:
    """Everything one call decodes with."""

    stages: Stages
    setting: Setting
    input_ids: Tensor  # (B, width), padding included
    attention_mask: Tensor | None  # (B, width), None without padding
    samplers: list[Sampler]  # one, or one for each row
    stops: list[StopRule]  # one, or one for each row
    max_lengths: list[int]  # likewise: most tokens in all
    config: GenerationConfig
    cache: RollbackCache
    grammar: GrammarProcessor | None = None
    shown: Tensor | None = None  # (B, width) the prompts as they were given, where padding stood elsewhere

    @property
    def mask(self) -> Tensor:
        """(B, width) what was given or found out by transformers, which drops a mask of ones and, asked again without
        one, would take the padding token in a prompt for padding."""
        return torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask

    def steps(self) -> Iterator[Step]:
        """Decode, with a warning where a row goes past the length that the model was made for."""
        made_for = getattr(self.stages.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if made_for is None or self.config.max_length <= made_for + 1:  # the last token is never read
            return self._decode()
        return self._watched(made_for)

    def _watched(self, made_for: int) -> Iterator[Step]:
        lengths, warned = [len(prompt) for prompt in self._prompts()], False
        for step in self._decode():
            lengths[step.row] += step.tokens.shape[1]
            if lengths[step.row] > made_for + 1 and not warned:
                warned = True
                warnings.warn(
                    f"decoding past {made_for} tokens, the length {type(self.stages.model).__name__} was made for "
                    "(max_position_embeddings): what follows may be poor, set max_new_tokens to end before",
                    stacklevel=2,
                )
            yield step

    def _decode(self) -> Iterator[Step]:
        sampled = any(sampler.do_sample for sampler in self.samplers)
        weigher = adaptive_for(self.stages, self.setting, sampled) if self.setting.weighs else nullcontext()
        with weigher as adaptive:
            yield from self._decode_with(drafter_for(self.setting, self.grammar, adaptive))

    def _decode_with(self, drafter: Drafter) -> Iterator[Step]:
        return decode(
            self.stages,
            self._prompts(),
            self.samplers[0] if len(self.samplers) == 1 else self.samplers,
            self.stops[0] if len(self.stops) == 1 else self.stops,
            drafter=drafter,
            max_length=self.max_lengths[0] if len(self.max_lengths) == 1 else self.max_lengths,
            cache=self.cache,
            contexts=list(self.input_ids),
            keep_scores=bool(self.config.output_scores or self.config.output_logits),
            prefill_chunk=self.config.prefill_chunk_size,
        )

    def _prompts(self) -> list[Tensor]:
        """(length,) of each row, without padding."""
        mask = None if self.attention_mask is None else self.attention_mask.bool()
        return [row if mask is None else row[mask[i]] for i, row in enumerate(self.input_ids)]
