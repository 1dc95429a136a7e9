"""Where committed tokens are cut: transformers' stopping criteria, asked after every single token.

Most criteria only look at the end of what they are given, so a block of accepted tokens is shown to them one
token at a time and cut at the first that says stop: never a token more than plain decoding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria


class StopRule:
    """A `decoding.Stop` over transformers' criteria."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        # The end-of-sequence ids are looked up in a set; the rest is asked.
        self.eos_token_ids: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:  # the loop itself counts the length
                self.others.append(criterion)

    def __call__(self, committed: Tensor, new: Tensor) -> tuple[int, bool]:
        """See `decoding.Stop`: committed (1, length), new (1, n) -> tokens kept (1 .. n), finished."""
        whole = torch.cat([committed, new], dim=1) if self.others else committed
        for kept, token in enumerate(new[0].tolist(), start=1):
            if token in self.eos_token_ids:
                return kept, True
            if self.others and bool(self.others(whole[:, : committed.shape[1] + kept], None).all()):
                return kept, True
        return new.shape[1], False


def take_stop_strings(
    model: PreTrainedModel, generation_config: GenerationConfig | None, arguments: dict[str, Any]
) -> StoppingCriteriaList:
    """Turn stop strings into a criterion, since transformers drops the tokenizer on its way to our loop.

    Takes `stop_strings`, `tokenizer` and `stopping_criteria` out of `arguments` and leaves a `stop_strings` of
    None there, so that transformers does not ask for the tokenizer either.

    Raises:
        ValueError: if there are stop strings but no tokenizer.
    """
    criteria = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
    tokenizer = arguments.pop("tokenizer", None)
    configs = (generation_config, model.generation_config)
    stop_strings = arguments.get("stop_strings") or next(
        (config.stop_strings for config in configs if config is not None and config.stop_strings), None
    )
    if stop_strings:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} needs the tokenizer: give tokenizer=... as well")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        arguments["stop_strings"] = None
    return criteria
