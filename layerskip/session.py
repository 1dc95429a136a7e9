"""One call, prepared: what transformers made of its arguments, in our terms.

transformers prepares everything it prepares for its own decoding (config, logits processors, stopping criteria,
lengths); its callable `custom_generate` door hands it over and our loop decodes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from layerskip.anatomy import check_rope, unwrap
from layerskip.cache import RollbackCache
from layerskip.decoding import Step, decode
from layerskip.drafters import drafter_for
from layerskip.sampling import Sampler
from layerskip.settings import Setting, resolve_setting
from layerskip.stages import Stages
from layerskip.stopping import StopRule, take_stop_strings
from layerskip.vocabulary import draft_vocabulary_of

if TYPE_CHECKING:
    from layerskip.grammar import Grammar, GrammarProcessor

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


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen where transformers has no word for it.

    Attributes:
        acceptance: rule of sampling: "rejection", "block" or "coupled".
        seed: of "coupled": one, or one for each row.
        generator: source of randomness of the other rules: one, or one for each row; None is torch's global one.
        grammar: what the output must be.
    """

    acceptance: str = "rejection"
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Session:
    """Everything one call decodes with."""

    stages: Stages
    setting: Setting
    input_ids: Tensor  # (B, width), padding included
    attention_mask: Tensor | None  # (B, width), None without padding
    samplers: list[Sampler]  # one, or one for each row
    stops: list[StopRule]  # one, or one for each row
    config: GenerationConfig
    cache: RollbackCache
    grammar: GrammarProcessor | None = None

    def steps(self) -> Iterator[Step]:
        """Decode."""
        mask = None if self.attention_mask is None else self.attention_mask.bool()
        prompts = [row if mask is None else row[mask[i]] for i, row in enumerate(self.input_ids)]
        return decode(
            self.stages,
            prompts,
            self.samplers[0] if len(self.samplers) == 1 else self.samplers,
            self.stops[0] if len(self.stops) == 1 else self.stops,
            drafter=drafter_for(self.setting, self.grammar),
            max_length=self.config.max_length,
            cache=self.cache,
            contexts=list(self.input_ids),
            keep_scores=bool(self.config.output_scores or self.config.output_logits),
            prefill_chunk=self.config.prefill_chunk_size,
        )


def prepare_session(
    model: nn.Module,
    inputs: Tensor | None,
    drafting: dict[str, Any],
    choice: Choice,
    *,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Session:
    """Have transformers prepare a call, and check all of it before anything is decoded.

    Args:
        drafting: fields of `Setting`, or "tuned".

    Raises:
        UnsupportedModelError: if the model cannot be cut into stages, or cannot take what is asked for.
        ValueError: for arguments out of range, or that this loop does not support.
    """
    if isinstance(generation_config, Sequence):
        return _prepare_rows(model, inputs, drafting, choice, generation_config, **kwargs)
    model = unwrap(model)
    for name, instead in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name} is not supported by layerskip.generate: {instead}")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, RollbackCache):
        raise ValueError(f"cannot decode with a {type(cache).__name__}: leave it out, or give layerskip.RollbackCache")
    setting = resolve_setting(model, **drafting)
    vocabulary = draft_vocabulary_of(model) if setting.draft_vocabulary and setting.exit_layer is not None else None
    stages = Stages(model, setting.exit_layer, vocabulary)
    if not setting.shape.is_chain or setting.lookup == "branch":
        stages.check_blocks(branching=True)
    criteria = take_stop_strings(model, generation_config, kwargs)
    grammar = None
    if choice.grammar is not None:
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        grammar = choice.grammar.processor(1 if prompt is None else prompt.shape[1])
        kwargs["logits_processor"] = LogitsProcessorList([*(kwargs.get("logits_processor") or []), grammar])
    door = partial(_door, stages=stages, setting=setting, own_cache=cache, choice=choice, grammar=grammar)
    return GenerationMixin.generate(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=criteria,
        custom_generate=door,
        **kwargs,
    )


def _prepare_rows(
    model: nn.Module,
    inputs: Tensor | None,
    drafting: dict[str, Any],
    choice: Choice,
    configs: Sequence[GenerationConfig],
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Session:
    """Every row with a generation config of its own: prepared one by one, decoded together."""
    prompts = inputs if inputs is not None else input_ids
    if prompts is None or len(prompts) != len(configs):
        given = "no prompts" if prompts is None else f"{len(prompts)} prompts"
        raise ValueError(f"got {len(configs)} generation configs for {given}: give one for each row")
    if any(config.num_return_sequences not in (None, 1) for config in configs):
        raise ValueError("num_return_sequences does not go with a generation config for each row: repeat the row")
    sessions = []
    for row, config in enumerate(configs):
        mask = None if attention_mask is None else attention_mask[row : row + 1]
        own = copy.copy(choice)
        if isinstance(choice.generator, Sequence):
            own = Choice(choice.acceptance, choice.seed, choice.generator[row], choice.grammar)
        prepared = prepare_session(
            model,
            prompts[row : row + 1],
            drafting,
            Choice(own.acceptance, _seeds(choice, len(configs)), own.generator, own.grammar),
            generation_config=config,
            attention_mask=mask,
            **kwargs,
        )
        sessions.append(prepared)
    first = sessions[0]
    first.stages.check_blocks(branching=False)
    longest = max(sessions, key=lambda session: session.config.max_length)
    stops = [StopRule(s.stops[0].criteria, s.config.max_length) for s in sessions]
    return Session(
        first.stages,
        first.setting,
        prompts.to(first.stages.model.device),
        attention_mask,
        [session.samplers[0] for session in sessions],
        stops,
        longest.config,
        first.stages.new_cache(min(longest.config.max_length, prompts.shape[1] + 256), longest.config.max_length),
        first.grammar,
    )


def _seeds(choice: Choice, batch: int) -> tuple[int, ...] | None:
    """One for each row: rows with the same prompt and the same noise would say the same."""
    if choice.seed is None:
        return None
    if isinstance(choice.seed, int):
        return tuple(choice.seed + row for row in range(batch))
    if len(choice.seed) != batch:
        raise ValueError(f"got {len(choice.seed)} seeds for {batch} rows: give one, or one for each")
    return tuple(choice.seed)


def _samplers(processors: LogitsProcessorList, do_sample: bool, choice: Choice, batch: int) -> list[Sampler]:
    """One for all rows, or one for each where each has its own generator."""
    seeds = _seeds(choice, batch) if isinstance(choice.seed, int) else choice.seed
    seeds = None if seeds is None else tuple(seeds)
    if isinstance(choice.generator, Sequence):
        if len(choice.generator) != batch:
            raise ValueError(f"got {len(choice.generator)} generators for {batch} rows: give one, or one for each")
        return [Sampler(processors, do_sample, g, choice.acceptance, seeds) for g in choice.generator]
    return [Sampler(processors, do_sample, choice.generator, choice.acceptance, seeds)]


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
    choice: Choice,
    grammar: GrammarProcessor | None,
    **model_kwargs: Any,
) -> Session:
    """What transformers calls instead of its own decoding loop: keeps what was prepared."""
    _refuse_mode(generation_config)
    batch, width = input_ids.shape
    if width == 0:
        raise ValueError("the prompt is empty: give at least one token, e.g. the tokenizer's bos_token")
    _refuse_arguments(model_kwargs)
    limit = generation_config.max_length
    check_rope(model, width, limit)
    if batch > 1:
        stages.check_blocks(branching=False)
    return Session(
        stages=stages,
        setting=setting,
        input_ids=input_ids.to(model.device),
        attention_mask=model_kwargs.get("attention_mask"),
        samplers=_samplers(logits_processor, bool(generation_config.do_sample), choice, batch),
        stops=[StopRule(stopping_criteria)],
        config=generation_config,
        cache=_cache(own_cache, stages, batch, width, limit),
        grammar=grammar,
    )


def _cache(given: RollbackCache | None, stages: Stages, batch: int, width: int, limit: int) -> RollbackCache:
    if given is None:
        return stages.new_cache(min(limit, width + 256), limit)
    if batch > 1:
        raise ValueError(f"a cache of one's own goes with a single sequence, not with {batch}: leave it out")
    if len(given.layers) != stages.num_layers:
        raise ValueError(
            f"the cache has {len(given.layers)} layers and the model {stages.num_layers}: "
            f"give RollbackCache({stages.num_layers})"
        )
    if given.length >= width:
        raise ValueError(
            f"the cache holds {given.length} positions but the prompt has only {width}: roll it back "
            "to at most one less than the prompt"
        )
    return given


def _refuse_arguments(model_kwargs: dict[str, Any]) -> None:
    lost = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _SEEN_TO)
    if lost:
        raise ValueError(f"{', '.join(lost)} cannot be passed on to the model: leave it out, or use model.generate()")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not mask.any(dim=1).all():
        raise ValueError("attention_mask hides every token of a prompt: show at least one")


def _refuse_mode(config: GenerationConfig) -> None:
    """Only decoding token after token; a checkpoint's own `assistant_early_exit` is what we replace."""
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
