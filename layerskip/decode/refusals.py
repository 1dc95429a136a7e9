"""What a call may not ask for: refused by name, with the way out, before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from layerskip.checkpoint.settings import DEFAULT_NUM_DRAFT_TOKENS, Setting
from layerskip.model.anatomy import num_layers
from layerskip.model.cache import RollbackCache

# generate() arguments that ask for something this loop does not do, and what to do instead.
_REFUSED = {
    "inputs_embeds": "give input_ids",
    "position_ids": "give attention_mask: positions are counted from it",
    "token_type_ids": "leave it out, or use model.generate()",
    "assistant_model": "the model drafts for itself: leave it out",
    "prompt_lookup_num_tokens": "give lookup='hybrid' or 'only', and num_lookup_tokens",
    "output_attentions": "leave it out, or use model.generate()",
    "output_hidden_states": "leave it out, or use model.generate()",
}


# What transformers hands over to the loop for the model, and the loop sees to by itself. Anything else would be lost.
_SEEN_TO = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}


def refuse_named(arguments: dict[str, Any]) -> None:
    """Refuse arguments of generate that this loop does nothing with."""
    for name, instead in _REFUSED.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name} is not supported by layerskip.generate: {instead}")


def refuse_cache(
    model: PreTrainedModel, cache: Any, arguments: dict[str, Any], generation_config: GenerationConfig | None
) -> None:
    """Only our own can be rolled back; transformers would prepare another kind that then is not used."""
    own = f"layerskip.RollbackCache({num_layers(model)})"
    if cache is not None and not isinstance(cache, RollbackCache):
        raise ValueError(f"cannot decode with a {type(cache).__name__}: leave it out, or give {own}")
    configs = (config for config in (generation_config, model.generation_config) if config is not None)
    asked = [arguments.get("cache_implementation"), *(config.cache_implementation for config in configs)]
    kind = next((name for name in asked if name is not None), None)
    # transformers itself takes a checkpoint's "hybrid" for "dynamic".
    if kind not in (None, "dynamic", "hybrid"):
        raise ValueError(
            f"cache_implementation={kind!r} is not supported by layerskip.generate, which decodes with a cache of its "
            "own that can be rolled back: set it to 'dynamic', or use model.generate()"
        )


def refuse_configs(given: Any, cache: Any) -> None:
    """Only a generation config, or one for each row, with what goes with that."""
    if not isinstance(given, Sequence):
        if not isinstance(given, GenerationConfig | None):
            raise ValueError(f"generation_config={given!r} is no GenerationConfig: give its settings by name")
        return
    if cache is not None:
        raise ValueError("a cache of one's own goes with a single generation config, not with a list: leave it out")
    if not all(isinstance(config, GenerationConfig) for config in given):
        raise ValueError(f"generation_config={given!r}: the list must hold a GenerationConfig for each row")
    for config in given:
        refuse_sequences(config.num_return_sequences or 1)


def refuse_sequences(number: int) -> None:
    """Of a row with a generation config of its own, only one can be returned."""
    if number != 1:
        raise ValueError(
            f"num_return_sequences={number} does not go with a generation config for each row: leave it at 1, and "
            "repeat the row"
        )


def refuse_block_of_trees(setting: Setting) -> None:
    """Whether the tree was asked for, or the checkpoint is tuned to it, a length takes its place."""
    if setting.grows_trees:
        raise ValueError(
            f"acceptance='block' judges chains, not tree={setting.tree!r}: leave acceptance out, or give "
            f"num_draft_tokens={DEFAULT_NUM_DRAFT_TOKENS} and no tree"
        )


def refuse_arguments(model_kwargs: dict[str, Any]) -> None:
    """Refuse what would be lost on its way to the model, and a mask that leaves nothing."""
    lost = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _SEEN_TO)
    if lost:
        raise ValueError(f"{', '.join(lost)} cannot be passed on to the model: leave it out, or use model.generate()")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not mask.any(dim=1).all():
        raise ValueError("attention_mask hides every token of a prompt: show at least one")


def refuse_mode(config: GenerationConfig) -> None:
    """Only decoding token after token; a checkpoint's own `assistant_early_exit` is what we replace."""
    mode = config.get_generation_mode()
    supported = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
    if mode not in supported:
        raise ValueError(
            f"{mode.value.replace('_', ' ')} cannot be drafted for: set num_beams=1 and leave penalty_alpha, "
            "dola_layers and the like out, or use model.generate()"
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False is not supported by layerskip.generate: leave it out, or set it to True")
    chunk = config.prefill_chunk_size
    if chunk is not None and chunk < 1:
        raise ValueError(f"prefill_chunk_size={chunk} reads nothing of the prompt: give 1 or more, or leave it out")
    for name, instead in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"{name} is not supported by layerskip.generate: {instead}")
