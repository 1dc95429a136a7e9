"""Classifier-free guidance that can be taken back: scores are pushed away from those without the prompt.

transformers' own processor keeps one cache that only grows. This one is a function of the prefix: what a position
shares with the last one asked about stays in its cache, the rest is read anew. Every position asked about costs a
pass of the whole model, drafts and verification alike: guided output is exact, but not faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from layerskip.model.cache import RollbackCache, shared_length
from layerskip.model.stages import Stages


class Guidance(LogitsProcessor):
    """s * (log p - log u) + log u, u being the model's after the negative prompt and the same new tokens
    (Sanchez et al. 2023, 2306.17806).

    Args:
        scale: s; 1 leaves p as it is.
        negative_prompt: (1, n) token ids; None: the prompt's last token.
        prompt_length: tokens before the output, padding included.
    """

    def __init__(
        self, model: PreTrainedModel, scale: float, negative_prompt: Tensor | None, prompt_length: int
    ) -> None:
        self.scale, self.negative_prompt, self.prompt_length = scale, negative_prompt, prompt_length
        self._stages = Stages(model, None)
        self._cache: RollbackCache = self._stages.new_cache()
        self._read: list[int] = []  # what the cache holds

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, vocab) scores of what follows (1, length) token ids."""
        conditional = scores.log_softmax(dim=-1)
        if self.scale == 1:
            return conditional
        unconditional = self._logits(input_ids).log_softmax(dim=-1).to(scores.device)
        return self.scale * (conditional - unconditional) + unconditional

    def _logits(self, input_ids: Tensor) -> Tensor:
        start = input_ids[:, self.prompt_length - 1 : self.prompt_length]
        start = start if self.negative_prompt is None else self.negative_prompt.to(input_ids.device)
        tokens = torch.cat([start, input_ids[:, self.prompt_length :]], dim=1)  # (1, n)
        wanted = tokens[0].tolist()
        shared = min(shared_length(self._read, wanted), len(wanted) - 1)  # one is read in any case, for its logits
        self._cache.rollback(shared)
        logits = self._stages.verify(tokens[:, shared:], None, self._cache)
        self._read = wanted
        return logits[:, -1].float()


def made_reversible(processors: LogitsProcessorList, model: PreTrainedModel, prompt_length: int) -> LogitsProcessorList:
    """The same processors, transformers' guidance replaced by ours."""
    replaced = LogitsProcessorList()
    for processor in processors:
        if type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
            context = processor.unconditional_context
            ids, mask = context["input_ids"], context["attention_mask"]
            if ids is not None and mask is not None:
                ids = ids[mask.bool()][None]
            processor = Guidance(model, processor.guidance_scale, ids, prompt_length)
        replaced.append(processor)
    return replaced
