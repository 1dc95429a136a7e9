"""transformers' door: it prepares a call as for its own decoding loop, and hands it over to ours.

What it prepares is the config, the logits processors, the stopping criteria and the lengths: a callable
`custom_generate` is given them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from layerskip.checkpoint.settings import Setting
from layerskip.decode.choice import Choice, samplers_of
from layerskip.decode.guidance import made_reversible
from layerskip.decode.refusals import refuse_arguments, refuse_block_of_trees, refuse_mode
from layerskip.decode.session import Session
from layerskip.decode.stopping import StopRule, take_stop_strings
from layerskip.model.anatomy import device_of
from layerskip.model.cache import RollbackCache, check_own_cache
from layerskip.model.lengths import check_positions, check_rope
from layerskip.model.stages import Stages

if TYPE_CHECKING:
    from layerskip.grammar.processor import GrammarProcessor


@dataclass(frozen=True)
class Call:
    """What was asked for, with one generation config for all rows.

    Attributes:
        stages: the model, cut where `setting` drafts.
        inputs: (B, width) prompts, where they were given by position.
        choice: how tokens are chosen where transformers has no word for it.
        config: generation config that was given.
        cache: one of the caller's own, holding the first positions of the prompt.
        arguments: of `model.generate`, all others, by name.
    """

    stages: Stages
    setting: Setting
    inputs: Tensor | None
    choice: Choice
    config: GenerationConfig | None
    cache: RollbackCache | None
    arguments: dict[str, Any]

    @property
    def model(self) -> PreTrainedModel:
        return self.stages.model

    @property
    def prompts(self) -> Tensor | None:
        """(B, width) token ids; None: transformers begins with the beginning-of-sequence token."""
        return self.inputs if self.inputs is not None else self.arguments.get("input_ids")

    @property
    def mask(self) -> Tensor | None:
        """(B, width) of what is no padding, where it was given."""
        return self.arguments.get("attention_mask")

    def showing(self, input_ids: Tensor, attention_mask: Tensor) -> Call:
        """The same call of these prompts."""
        others = {name: value for name, value in self.arguments.items() if name != "input_ids"}
        return replace(self, inputs=input_ids, arguments={**others, "attention_mask": attention_mask})

    def again(self, session: Session) -> Call:
        """The call that a session was made of, to be prepared anew with the prompts that transformers made of it, a row
        for each sequence. The streamer has had the prompt by now."""
        call = self.showing(session.input_ids, session.mask)
        others = {name: value for name, value in call.arguments.items() if name != "streamer"}
        return replace(call, arguments={**others, "num_return_sequences": 1})


def prepare_call(call: Call) -> Session:
    """Have transformers prepare a call, and check what it made of it.

    Raises:
        UnsupportedModelError: if the model cannot take what is asked for.
        ValueError: for arguments out of range, or that our loop does not support.
    """
    prompts = call.prompts
    if prompts is None:
        return _through(call)
    if call.mask is not None:
        # What reads a prefix must not find padding between a prompt and what follows it.
        session = _through(call.showing(*padded_left(prompts, call.mask)))
    else:
        session = _through(call)
        found = session.attention_mask
        if found is not None and bool((found.long().diff(dim=1) < 0).any()):
            # transformers found padding on the right by itself, and made processors for where it stands.
            session = prepare_call(call.again(session))
    sequences = len(session.input_ids) // len(prompts)  # of each prompt
    return replace(session, shown=prompts.repeat_interleave(sequences, 0))


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


def _through(call: Call) -> Session:
    """Through the door."""
    arguments = dict(call.arguments)
    criteria = take_stop_strings(call.model, call.config, arguments)
    grammar = None
    if call.choice.grammar is not None:
        grammar = call.choice.grammar.processor(1 if call.prompts is None else call.prompts.shape[1])
        arguments["logits_processor"] = LogitsProcessorList([*(arguments.get("logits_processor") or []), grammar])
    session = GenerationMixin.generate(
        call.model,
        call.inputs,
        generation_config=call.config,
        stopping_criteria=criteria,
        custom_generate=partial(_behind, call=call, grammar=grammar),
        **arguments,
    )
    return cast(Session, session)


def _behind(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    call: Call,
    grammar: GrammarProcessor | None,
    **model_kwargs: Any,
) -> Session:
    """What transformers calls instead of its own decoding loop: keeps what was prepared."""
    _check(call, input_ids, generation_config, model_kwargs)
    (batch, width), limit = input_ids.shape, generation_config.max_length
    processors = made_reversible(logits_processor, model, width)
    return Session(
        stages=call.stages,
        setting=call.setting,
        input_ids=input_ids.to(device_of(model)),
        attention_mask=model_kwargs.get("attention_mask"),
        samplers=samplers_of(processors, bool(generation_config.do_sample), call.choice, batch),
        stops=[StopRule(stopping_criteria)],
        max_lengths=[limit],
        config=generation_config,
        cache=new_cache(call.stages, width, limit) if call.cache is None else call.cache,
        grammar=grammar,
    )


def _check(call: Call, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse what only shows once transformers has prepared the call."""
    refuse_mode(config)
    if config.do_sample and call.choice.acceptance == "block":
        refuse_block_of_trees(call.setting)
    batch, width = input_ids.shape
    if width == 0:
        raise ValueError("the prompt is empty: give at least one token, e.g. the tokenizer's bos_token")
    refuse_arguments(model_kwargs)
    check_rope(call.model, width, config.max_length)
    mask = model_kwargs.get("attention_mask")
    lengths = [width] * batch if mask is None else mask.bool().sum(1).tolist()  # of the prompts without padding
    check_positions(call.model, max(lengths), config.max_length - width)
    if call.cache is not None:
        check_own_cache(call.cache, call.stages.num_layers, lengths)
        call.stages.fit(call.cache)
    if batch > 1:
        call.stages.check_blocks(branching=False)


def new_cache(stages: Stages, width: int, limit: int) -> RollbackCache:
    """For prompts of so many tokens that may grow to `limit`."""
    return stages.new_cache(min(limit, width + 256), limit)
