"""A call, prepared: one generation config for all rows, or one for each.

Rows that share a config are prepared together, but where a logits processor reads the prefix: it may hold something of
every row (the prompts, an index), and is asked row by row, so each row gets its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from layerskip.checkpoint.resolving import resolve_setting
from layerskip.checkpoint.settings import Setting
from layerskip.checkpoint.vocabulary import draft_vocabulary_of
from layerskip.decode.choice import Choice, seeds_of
from layerskip.decode.door import Call, new_cache, prepare_call
from layerskip.decode.refusals import refuse_cache, refuse_configs, refuse_named, refuse_sequences
from layerskip.decode.session import Session
from layerskip.draft.exits import first_exit, prepare_exits
from layerskip.model.anatomy import unwrap
from layerskip.model.stages import Stages

_OF_ROWS = ("attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask")  # (B, n) each


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
    refuse_configs(generation_config, cache)
    inner = unwrap(model)
    refuse_named(kwargs)
    for config in generation_config if isinstance(generation_config, Sequence) else [generation_config]:
        refuse_cache(inner, cache, kwargs, config)
    setting = resolve_setting(inner, **drafting)
    call = Call(_stages_for(inner, setting), setting, inputs, choice, None, cache, kwargs)
    if isinstance(generation_config, Sequence):
        return _prepare_rows(call, generation_config)
    call = replace(call, config=generation_config)
    session = prepare_call(call)
    batch = len(session.input_ids)
    if batch == 1 or not session.samplers[0].reads_prefix:
        return session
    return replace(_prepare_rows(call.again(session), [generation_config] * batch), shown=session.shown)


def _stages_for(model: PreTrainedModel, setting: Setting) -> Stages:
    """The model cut at every exit that may draft, and checked for what it will have to take."""
    vocabulary = draft_vocabulary_of(model) if setting.draft_vocabulary and setting.exit_layer is not None else None
    stages = prepare_exits(Stages(model, first_exit(model, setting), vocabulary), setting)
    if not setting.shape.is_chain or setting.lookup == "branch":
        stages.check_blocks(branching=True)
    return stages


def _prepare_rows(call: Call, configs: Sequence[GenerationConfig | None]) -> Session:
    """Every row with a generation config and processors of its own: prepared one by one, decoded together."""
    prompts, batch = call.prompts, len(configs)
    if prompts is None or len(prompts) != batch:
        given = "no prompts" if prompts is None else f"{len(prompts)} prompts"
        raise ValueError(f"got {batch} generation configs for {given}: give one for each row")
    sessions = [prepare_call(_row(call, prompts, row, config)) for row, config in enumerate(configs)]
    refuse_sequences(max(len(session.input_ids) for session in sessions))
    if batch > 1:
        call.stages.check_blocks(branching=False)
    longest = max((session.config for session in sessions), key=lambda config: config.max_length)
    seeds = seeds_of(call.choice, batch)
    return Session(
        stages=call.stages,
        setting=call.setting,
        input_ids=torch.cat([session.input_ids for session in sessions]),
        attention_mask=torch.cat([session.mask for session in sessions]),
        samplers=[replace(session.samplers[0], seeds=seeds) for session in sessions],
        stops=[session.stops[0] for session in sessions],
        max_lengths=[session.config.max_length for session in sessions],
        config=longest,
        cache=new_cache(call.stages, prompts.shape[1], longest.max_length),
        grammar=sessions[0].grammar,
        shown=prompts,
    )


def _row(call: Call, prompts: Tensor, row: int, config: GenerationConfig | None) -> Call:
    """What is asked for one row of a batch."""
    arguments = {name: value for name, value in call.arguments.items() if name != "input_ids"}
    for name in _OF_ROWS:
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][row : row + 1]
    allowed = arguments.get("prefix_allowed_tokens_fn")
    if allowed is not None:
        arguments["prefix_allowed_tokens_fn"] = partial(_allowed_in, allowed, row)
    choice = call.choice.of_row(row, len(prompts))
    return replace(call, inputs=prompts[row : row + 1], choice=choice, config=config, arguments=arguments)


def _allowed_in(function: Callable[[int, Tensor], list[int]], row: int, _: int, token_ids: Tensor) -> list[int]:
    """transformers calls a `prefix_allowed_tokens_fn` with the row's number, which is 0 for all of ours."""
    return function(row, token_ids)
