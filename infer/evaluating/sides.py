"""The sides that lm-evaluation-harness compares: the model, one of its exits alone, and self-speculative decoding.

Each is the harness's own wrapper of a Hugging Face model with two of its steps replaced: what logits a text gets, and
how an answer is generated. Prompts, batches, truncation, stop strings and scores stay the harness's.
"""

from typing import Any, cast

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

import layerskip
from infer.evaluating.exit_only import ExitStages, generate_at_exit
from infer.loading import Loaded
from layerskip.checkpoint.settings import Setting
from layerskip.decode.stats import Statistics


class ModelSide(HFLM):
    """The model, plainly decoded by transformers."""

    def __init__(self, loaded: Loaded, batch_size: int) -> None:
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal", batch_size=batch_size)

    def _generate_arguments(self, stop: list[str], arguments: dict[str, Any]) -> dict[str, Any]:
        """The harness's words in those of `generate`."""
        temperature = arguments.pop("temperature", 0.0)
        sampled = arguments.pop("do_sample", None)
        sampled = temperature > 0 if sampled is None else bool(sampled)
        if sampled and temperature > 0:
            arguments["temperature"] = temperature
        strings = {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        return {**arguments, **strings, "do_sample": sampled, "pad_token_id": self.tokenizer.pad_token_id}


class ExitSide(ModelSide):
    """Layers [0:exit_layer), the exit's adapter and the whole head."""

    def __init__(self, loaded: Loaded, batch_size: int, exit_layer: int) -> None:
        super().__init__(loaded, batch_size)
        self.stages = ExitStages(loaded.model, exit_layer)

    @torch.no_grad()
    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """(batch, n) tokens, padded on the right -> logits (batch, n, vocab)."""
        return self.stages.logits(inps)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments: Any) -> Tensor:
        """(batch, width) prompts, padded on the left -> (batch, width + new)."""
        return generate_at_exit(
            self.stages, context, max_length=max_length, **self._generate_arguments(stop, arguments)
        )


class SelfSpeculativeSide(ModelSide):
    """The model, decoded by `layerskip.generate`. Log-likelihoods are the model's own: there is nothing to draft.

    Attributes:
        statistics: of everything generated so far.
    """

    def __init__(self, loaded: Loaded, batch_size: int, setting: Setting) -> None:
        super().__init__(loaded, batch_size)
        self.setting, self.statistics = setting, Statistics()

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments: Any) -> Tensor:
        """(batch, width) prompts, padded on the left -> (batch, width + new)."""
        output = layerskip.generate(
            self.model,
            context,
            max_length=max_length,
            return_dict_in_generate=True,
            **vars(self.setting),
            **self._generate_arguments(stop, arguments),
        )
        assert isinstance(output, layerskip.SelfSpeculativeOutput)
        assert output.statistics is not None
        self.statistics.merge(output.statistics)
        return cast(Tensor, output.sequences)
