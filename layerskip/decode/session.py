"""One call, prepared: what transformers made of its arguments, in our terms.

transformers prepares everything it prepares for its own decoding (config, logits processors, stopping criteria,
lengths); its callable `custom_generate` door hands it over and our loop decodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from layerskip.checkpoint.resolving import resolve_setting
from layerskip.checkpoint.settings import Setting
from layerskip.checkpoint.vocabulary import draft_vocabulary_of
from layerskip.decode.choice import Choice, samplers_of, seeds_of
from layerskip.decode.decoding import Step, decode
from layerskip.decode.guidance import made_reversible
from layerskip.decode.refusals import refuse_arguments, refuse_cache, refuse_mode, refuse_named
from layerskip.decode.stopping import StopRule, take_stop_strings
from layerskip.draft.adaptive import adaptive_for
from layerskip.draft.drafters import Drafter, drafter_for
from layerskip.draft.exits import first_exit, prepare_exits
from layerskip.exact.sampling import Sampler
from layerskip.model.anatomy import check_positions, check_rope, device_of, unwrap
from layerskip.model.cache import RollbackCache, check_own_cache
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
        if not self.setting.weighs:
            return self._decode_with(drafter_for(self.setting, self.grammar))
        return self._decode_adaptively()

    def _decode_adaptively(self) -> Iterator[Step]:
        sampled = any(sampler.do_sample for sampler in self.samplers)
        with adaptive_for(self.stages, self.setting, sampled) as adaptive:
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
    cache = past_key_values if cache is None else cache
    if isinstance(generation_config, Sequence):
        if cache is not None:
            raise ValueError("a cache of one's own goes with a single generation config, not with a list: leave it out")
        if not all(isinstance(config, GenerationConfig) for config in generation_config):
            raise ValueError(
                f"generation_config={generation_config!r}: the list must hold a GenerationConfig for each row"
            )
        if any(config.num_return_sequences not in (None, 1) for config in generation_config):
            raise ValueError("num_return_sequences does not go with a generation config for each row: repeat the row")
        return _prepare_rows(model, inputs, drafting, choice, generation_config, **kwargs)
    if not isinstance(generation_config, GenerationConfig | None):
        raise ValueError(f"generation_config={generation_config!r} is no GenerationConfig: give its settings by name")
    model = unwrap(model)
    given_ids = inputs if inputs is not None else kwargs.get("input_ids")
    if given_ids is not None and kwargs.get("attention_mask") is not None:
        # What reads a prefix must not find padding between a prompt and what follows it.
        inputs, kwargs["attention_mask"] = padded_left(given_ids, kwargs["attention_mask"])
        kwargs.pop("input_ids", None)
    refuse_named(kwargs)
    refuse_cache(model, cache, kwargs, generation_config)
    setting = resolve_setting(model, **drafting)
    vocabulary = draft_vocabulary_of(model) if setting.draft_vocabulary and setting.exit_layer is not None else None
    stages = prepare_exits(Stages(model, first_exit(model, setting), vocabulary), setting)
    if not setting.shape.is_chain or setting.lookup == "branch":
        stages.check_blocks(branching=True)
    # For when the call is prepared again: the streamer then has the prompt already.
    given = {name: value for name, value in kwargs.items() if name != "streamer"}
    criteria = take_stop_strings(model, generation_config, kwargs)
    grammar = None
    if choice.grammar is not None:
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        grammar = choice.grammar.processor(1 if prompt is None else prompt.shape[1])
        kwargs["logits_processor"] = LogitsProcessorList([*(kwargs.get("logits_processor") or []), grammar])
    door = partial(_door, stages=stages, setting=setting, own_cache=cache, choice=choice, grammar=grammar)
    session = GenerationMixin.generate(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=criteria,
        custom_generate=door,
        **kwargs,
    )
    if given_ids is not None:
        shown = given_ids.repeat_interleave(len(session.input_ids) // len(given_ids), 0)
        found = None if given.get("attention_mask") is not None else session.attention_mask
        if found is not None and bool((found.long().diff(dim=1) < 0).any()):
            # transformers found the padding out by itself, and made processors for where it stands.
            given |= {"input_ids": None, "attention_mask": found, "num_return_sequences": 1}
            arguments = {"generation_config": generation_config, "cache": cache, **given}
            session = prepare_session(model, session.input_ids, drafting, choice, **arguments)
        session = replace(session, shown=shown)
    if len(session.input_ids) == 1 or not session.samplers[0].reads_prefix:
        return session
    # Processors that read the prefix may hold something of every row (the prompts, an index). They are asked row by
    # row, so each row gets its own.
    given |= {"input_ids": None, "attention_mask": _mask(session), "num_return_sequences": 1}
    configs = [generation_config] * len(session.input_ids)
    rows = _prepare_rows(model, session.input_ids, drafting, choice, configs, **given)
    return replace(rows, shown=session.shown)


def _prepare_rows(
    model: nn.Module,
    inputs: Tensor | None,
    drafting: dict[str, Any],
    choice: Choice,
    configs: Sequence[GenerationConfig | None],
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    negative_prompt_ids: Tensor | None = None,
    negative_prompt_attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Session:
    """Every row with a generation config and processors of its own: prepared one by one, decoded together."""
    prompts = inputs if inputs is not None else input_ids
    if prompts is None or len(prompts) != len(configs):
        given = "no prompts" if prompts is None else f"{len(prompts)} prompts"
        raise ValueError(f"got {len(configs)} generation configs for {given}: give one for each row")
    batch, seeds, sessions = len(configs), seeds_of(choice, len(configs)), []
    for row, config in enumerate(configs):
        if prefix_allowed_tokens_fn is not None:  # transformers calls it with the row's number
            kwargs["prefix_allowed_tokens_fn"] = partial(_of_row, prefix_allowed_tokens_fn, row)
        if negative_prompt_ids is not None:
            kwargs["negative_prompt_ids"] = negative_prompt_ids[row : row + 1]
        if negative_prompt_attention_mask is not None:
            kwargs["negative_prompt_attention_mask"] = negative_prompt_attention_mask[row : row + 1]
        own = choice.of_row(row, batch)
        mask = None if attention_mask is None else attention_mask[row : row + 1]
        prompt = prompts[row : row + 1]
        sessions.append(
            prepare_session(model, prompt, drafting, own, generation_config=config, attention_mask=mask, **kwargs)
        )
    first = sessions[0]
    if batch > 1:
        first.stages.check_blocks(branching=False)
    longest = max((session.config for session in sessions), key=lambda config: config.max_length)
    return Session(
        stages=first.stages,
        setting=first.setting,
        input_ids=torch.cat([session.input_ids for session in sessions]),
        attention_mask=torch.cat([_mask(session) for session in sessions]),
        samplers=[replace(session.samplers[0], seeds=seeds) for session in sessions],
        stops=[session.stops[0] for session in sessions],
        max_lengths=[session.config.max_length for session in sessions],
        config=longest,
        cache=_new_cache(first.stages, prompts.shape[1], longest.max_length),
        grammar=first.grammar,
        shown=prompts,
    )


def padded_left(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, width) prompts and their mask with all padding before them, wherever it stood.

    Raises:
        ValueError: if the two have different shapes.
    """
    if input_ids.shape != attention_mask.shape:
        shapes = f"{tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask has the shape {shapes}: it must hold a 0 or 1 for each token")
    order = attention_mask.bool().to(torch.uint8).argsort(dim=1, stable=True).to(input_ids.device)
    return input_ids.gather(1, order), attention_mask.gather(1, order.to(attention_mask.device))


def _mask(session: Session) -> Tensor:
    """What was given or found out by transformers, which drops a mask of ones and, asked again without one, would take
    the padding token in a prompt for padding."""
    return torch.ones_like(session.input_ids) if session.attention_mask is None else session.attention_mask


def _of_row(function: Callable[[int, Tensor], list[int]], row: int, _: int, token_ids: Tensor) -> list[int]:
    return function(row, token_ids)


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
    refuse_mode(generation_config)
    if setting.grows_trees and choice.acceptance == "block" and generation_config.do_sample:
        raise ValueError(f"acceptance='block' judges chains, not tree={setting.tree!r}: leave one of the two out")
    batch, width = input_ids.shape
    if width == 0:
        raise ValueError("the prompt is empty: give at least one token, e.g. the tokenizer's bos_token")
    refuse_arguments(model_kwargs)
    limit = generation_config.max_length
    check_rope(model, width, limit)
    mask = model_kwargs.get("attention_mask")
    lengths = [width] * batch if mask is None else mask.bool().sum(1).tolist()  # of the prompts without padding
    check_positions(model, max(lengths), limit - width)
    if own_cache is not None:
        check_own_cache(own_cache, stages.num_layers, lengths)
    if batch > 1:
        stages.check_blocks(branching=False)
    return Session(
        stages=stages,
        setting=setting,
        input_ids=input_ids.to(device_of(model)),
        attention_mask=mask,
        samplers=samplers_of(
            made_reversible(logits_processor, model, width), bool(generation_config.do_sample), choice, batch
        ),
        stops=[StopRule(stopping_criteria)],
        max_lengths=[limit],
        config=generation_config,
        cache=_new_cache(stages, width, limit) if own_cache is None else own_cache,
        grammar=grammar,
    )


def _new_cache(stages: Stages, width: int, limit: int) -> RollbackCache:
    return stages.new_cache(min(limit, width + 256), limit)
