"""generate(): a drop-in for `model.generate()` that decodes by self-speculation, and steps() and stream().

transformers prepares everything it prepares for its own decoding (config, logits processors, stopping criteria,
lengths); its callable `custom_generate` door hands it over and our loop decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer

from layerskip.anatomy import check_rope, unwrap
from layerskip.cache import RollbackCache
from layerskip.decoding import Step, decode
from layerskip.sampling import Sampler
from layerskip.settings import Setting, resolve_setting
from layerskip.stages import Stages
from layerskip.stats import Statistics
from layerskip.stopping import StopRule, take_stop_strings

Tuned = Literal["tuned"]

# generate() arguments that ask for something this loop does not do, and what to do instead.
_REFUSED = {
    "inputs_embeds": "give input_ids",
    "position_ids": "give attention_mask: positions are counted from it",
    "token_type_ids": "leave it out, or use model.generate()",
    "assistant_model": "the model drafts for itself: leave it out",
    "prompt_lookup_num_tokens": "leave it out, or use model.generate()",
    "negative_prompt_ids": "classifier-free guidance keeps a state that cannot be rolled back: use model.generate()",
    "output_attentions": "leave it out, or use model.generate()",
    "output_hidden_states": "leave it out, or use model.generate()",
}


# What transformers hands over to the loop for the model, and the loop sees to by itself. Anything else would be lost.
_SEEN_TO = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}


@dataclass
class SelfSpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` (scores and logits are the target's) with the run's `statistics`."""

    statistics: Statistics | None = None


@dataclass(frozen=True)
class Session:
    """Everything one call decodes with; what transformers prepared, in our terms."""

    stages: Stages
    setting: Setting
    input_ids: Tensor  # (1, length), padding included
    attention_mask: Tensor | None  # (1, length), None without padding
    sampler: Sampler
    criteria: StoppingCriteriaList
    config: GenerationConfig
    cache: RollbackCache

    def steps(self) -> Iterator[Step]:
        prompt = self.input_ids if self.attention_mask is None else self.input_ids[self.attention_mask.bool()][None]
        return decode(
            self.stages,
            prompt,
            self.sampler,
            StopRule(self.criteria),
            num_draft_tokens=self.setting.num_draft_tokens,
            max_length=self.config.max_length,
            cache=self.cache,
            context_ids=self.input_ids,
            keep_scores=bool(self.config.output_scores or self.config.output_logits),
        )


def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    exit_layer: int | Tuned | None = "tuned",
    num_draft_tokens: int | Tuned = "tuned",
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> Tensor | SelfSpeculativeOutput:
    """Generate as `model.generate(inputs, **kwargs)` does, drafting with layers [0:exit_layer).

    Greedy output is the model's own, token for token (in float32; in lower precision up to near-ties); sampled
    output has the model's own distribution.

    Args:
        model: a decoder-only causal LM in eval mode.
        inputs: (1, length) prompt token ids; `input_ids=` and `attention_mask=` work too. What the mask hides is
            taken out of the prompt, wherever it stands.
        exit_layer: layers that draft, 1 .. L-1; "tuned" is what the checkpoint carries; None is plain decoding.
        num_draft_tokens: most tokens drafted a step; "tuned" is what the checkpoint carries, else 4.
        streamer: as in transformers; is put each step's tokens at once.
        **kwargs: anything else `model.generate` takes, and `cache=`, a `RollbackCache` holding the first
            positions of the prompt (and, after the call, all but the last token).

    Returns:
        (1, length + new) token ids, or with `return_dict_in_generate=True` a `SelfSpeculativeOutput`.

    Raises:
        UnsupportedModelError, ValueError: before anything is decoded.
    """
    session = prepare_session(model, inputs, exit_layer, num_draft_tokens, streamer=streamer, **kwargs)
    statistics, sequence = Statistics(), [session.input_ids]
    scores: list[Tensor] = []
    logits: list[Tensor] = []
    for step in session.steps():
        statistics.add(step)
        sequence.append(step.tokens)
        if step.scores is not None and step.logits is not None:
            scores.extend(step.scores.unbind(1))  # one (1, vocab) a token, as transformers gives them
            logits.extend(step.logits.float().unbind(1))
        if streamer is not None:
            streamer.put(step.tokens[0].cpu())
    if streamer is not None:
        streamer.end()
    sequences = torch.cat(sequence, dim=1)
    if not session.config.return_dict_in_generate:
        return sequences
    return SelfSpeculativeOutput(
        sequences=sequences,
        scores=tuple(scores) if session.config.output_scores else None,
        logits=tuple(logits) if session.config.output_logits else None,
        statistics=statistics,
    )


def steps(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    exit_layer: int | Tuned | None = "tuned",
    num_draft_tokens: int | Tuned = "tuned",
    **kwargs: Any,
) -> Iterator[Step]:
    """The same as `generate`, as a generator of `Step`s that may be abandoned at any point."""
    return prepare_session(model, inputs, exit_layer, num_draft_tokens, **kwargs).steps()


def prepare_session(
    model: nn.Module,
    inputs: Tensor | None,
    exit_layer: int | Tuned | None,
    num_draft_tokens: int | Tuned,
    *,
    cache: Any = None,
    past_key_values: Any = None,
    generator: torch.Generator | None = None,
    generation_config: GenerationConfig | None = None,
    **kwargs: Any,
) -> Session:
    """Have transformers prepare a call, and check all of it before anything is decoded.

    Args:
        generator: source of randomness; None is torch's global one, as in transformers.

    Raises:
        UnsupportedModelError: if the model cannot be cut into stages.
        ValueError: for arguments out of range, or that this loop does not support.
    """
    model = unwrap(model)
    for name, instead in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name} is not supported by layerskip.generate: {instead}")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, RollbackCache):
        raise ValueError(f"cannot decode with a {type(cache).__name__}: leave it out, or give layerskip.RollbackCache")
    setting = resolve_setting(model, exit_layer, num_draft_tokens)
    stages = Stages(model, setting.exit_layer)
    criteria = take_stop_strings(model, generation_config, kwargs)
    door = partial(_door, stages=stages, setting=setting, own_cache=cache, generator=generator)
    return GenerationMixin.generate(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=criteria,
        custom_generate=door,
        **kwargs,
    )


def _door(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    stages: Stages,
    setting: Setting,
    own_cache: RollbackCache | None,
    generator: torch.Generator | None,
    **model_kwargs: Any,
) -> Session:
    """What transformers calls instead of its own decoding loop: keeps what was prepared."""
    _refuse_mode(generation_config)
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"got {input_ids.shape[0]} sequences, but one is decoded at a time: call generate once for each "
            "(num_return_sequences is 1)"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token, e.g. the tokenizer's bos_token")
    _refuse_arguments(model_kwargs)
    limit = generation_config.max_length
    check_rope(model, input_ids.shape[1], limit)
    if own_cache is None:
        own_cache = stages.new_cache(min(limit, input_ids.shape[1] + 256), limit)
    elif len(own_cache.layers) != stages.num_layers:
        raise ValueError(
            f"the cache has {len(own_cache.layers)} layers and the model {stages.num_layers}: "
            f"give RollbackCache({stages.num_layers})"
        )
    elif own_cache.length >= input_ids.shape[1]:
        raise ValueError(
            f"the cache holds {own_cache.length} positions but the prompt has only {input_ids.shape[1]}: roll it back "
            "to at most one less than the prompt"
        )
    return Session(
        stages=stages,
        setting=setting,
        input_ids=input_ids.to(model.device),
        attention_mask=model_kwargs.get("attention_mask"),
        sampler=Sampler(logits_processor, bool(generation_config.do_sample), generator),
        criteria=stopping_criteria,
        config=generation_config,
        cache=own_cache,
    )


def _refuse_arguments(model_kwargs: dict[str, Any]) -> None:
    lost = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _SEEN_TO)
    if lost:
        raise ValueError(f"{', '.join(lost)} cannot be passed on to the model: leave it out, or use model.generate()")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not mask.any():
        raise ValueError("attention_mask hides every token of the prompt: show at least one")


def _refuse_mode(config: GenerationConfig) -> None:
    """Only one sequence decoded token after token; a checkpoint's own `assistant_early_exit` is what we replace."""
    mode = config.get_generation_mode()
    supported = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
    if mode not in supported:
        raise ValueError(
            f"{mode.value.replace('_', ' ')} cannot be drafted for: set num_beams=1 and leave penalty_alpha, "
            "dola_layers and the like out, or use model.generate()"
        )
    for name, instead in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"{name} is not supported by layerskip.generate: {instead}")
