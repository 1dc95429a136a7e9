"""What a model writes: prompts continued in batches, each row greedy or sampled with a seed of its own.

So a row's text does not depend on its place in a run: what was stopped and goes on writes the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from train.model import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from. The defaults are transformers' own."""

    temperature: float = 1.0
    top_k: int | None = 50  # only among this many; None: all
    top_p: float = 1.0  # only among the most probable that make up this share


class RowNoise(LogitsProcessor):
    """Gumbel noise on the logits, each row's from its own seed: the greatest is then a sample of their softmax.

    argmax(log p + G) with independent G = -log(-log U) is distributed as p (Gumbel 1954; Maddison et al. 2014).
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        # On the CPU, so that the noise is the same on every device.
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Noisy (rows, vocab) scores."""
        noisy = scores.float().clone()
        for row, generator in zip(noisy, self._generators, strict=True):
            open_ = row.isfinite().nonzero()[:, 0]  # what was ruled out needs none: of a large vocabulary nearly all
            row[open_] -= torch.empty(len(open_)).exponential_(generator=generator).log().to(row.device)
        return noisy


def continue_prompts(
    model: "PreTrainedModel",
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    padding: int,
    ends: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    min_new_tokens: int = 0,
) -> list[Tensor]:
    """New tokens for each prompt, on the CPU: (n,) with n ≤ max_new_tokens, an end among them last.

    Args:
        model: put in eval mode for the moment; the caller's autocast applies.
        prompts: (length,) ids each, of any lengths.
        max_new_tokens: at most, of each.
        padding: the id that evens lengths out, on the left.
        ends: ids after which a row is finished; none: all rows get `max_new_tokens`.
        seeds: one for each row, to sample as `sampling` says; None is greedy.
        min_new_tokens: no end before this many.
    """
    ids, mask = _padded(prompts, padding, model.device)
    with evaluating(model):
        # Every setting of sampling is said, or the checkpoint's own would apply.
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            temperature=1.0,
            top_k=50,
            top_p=1.0,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=padding,
            logits_processor=_processors(seeds, sampling or Sampling()) if seeds is not None else None,
        )
    return [cut_after(row[ids.shape[1] :], ends) for row in output.cpu()]


def _padded(prompts: Sequence[Tensor], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as rows that end together, and the mask that leaves out what fills them up: (rows, longest) each."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), padding, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt.to(device)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def cut_after(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """(length,) tokens up to and with the first of `ends`."""
    found = torch.isin(tokens, torch.tensor(list(ends), dtype=tokens.dtype)).nonzero()
    return tokens[: int(found[0]) + 1] if len(found) else tokens


def _processors(seeds: Sequence[int], sampling: Sampling) -> LogitsProcessorList:
    processors: list[LogitsProcessor] = []
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList([*processors, RowNoise(seeds)])


def end_ids(model: "PreTrainedModel", tokenizer_end: int | None) -> list[int]:
    """The ids that end a text: those of the model's generation config, and the tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({end for end in (*ends, tokenizer_end) if end is not None})
