"""Where a transformers model keeps what the stages need, and which models are refused, with the reason.

This file and `views.py` are the only ones that know how transformers' models are built; neither knows a family.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from layerskip.model.block import Sight


class UnsupportedModelError(ValueError):
    """The model cannot be cut into stages; the message says why."""


@dataclass(frozen=True)
class Anatomy:
    """Where a model keeps what the stages need.

    Attributes:
        layers_path: attribute path from the model to its list of decoder layers, e.g. ("model", "layers").
        num_layers: L.
        cache_argument: name of `forward`'s cache argument (`cache` since transformers 5.24).
        keeps_logits: whether `forward` takes `logits_to_keep`.
        takes_positions: whether `forward` takes `position_ids`.
        sights: how far each layer looks back.
        num_positions: rows of the model's table of positions; None where positions are computed.
    """

    layers_path: tuple[str, ...]
    num_layers: int
    cache_argument: str
    keeps_logits: bool
    takes_positions: bool
    sights: tuple[Sight, ...]
    num_positions: int | None


_anatomies: weakref.WeakKeyDictionary[nn.Module, Anatomy] = weakref.WeakKeyDictionary()


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the parts of `model` that stages are made of, or refuse it.

    Raises:
        UnsupportedModelError: with the reason.
    """
    if model not in _anatomies:
        _refuse_unsupported(model)
        path, count = _find_layers(model)
        parameters = inspect.signature(type(model).forward).parameters
        _anatomies[model] = Anatomy(
            layers_path=path,
            num_layers=count,
            cache_argument="cache" if "cache" in parameters else "past_key_values",
            keeps_logits="logits_to_keep" in parameters,
            takes_positions="position_ids" in parameters,
            sights=_sights(model.config.get_text_config(decoder=True), count),
            num_positions=_num_positions(model),
        )
    return _anatomies[model]


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT, torch.compile or (D)DP wrapper.

    Raises:
        UnsupportedModelError: if there is no causal LM inside, or an adapter that is not in its layers.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model"):
            _refuse_adapter(model)
            model = model.get_base_model()  # type: ignore[operator]
        elif not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # type: ignore[assignment]
        else:
            break
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers causal LM: load one with AutoModelForCausalLM"
        )
    return model


def _refuse_adapter(model: nn.Module) -> None:
    """What a PEFT wrapper does around the model's forward (virtual tokens, gates over the whole prompt) is not in the
    layers, and would be lost."""
    config = getattr(model, "active_peft_config", None)
    kind = str(getattr(getattr(config, "peft_type", None), "value", ""))
    activated = bool(getattr(config, "alora_invocation_tokens", None))
    if getattr(config, "is_prompt_learning", False) or kind in ("XLORA", "POLY") or activated:
        kind = f"activated {kind}" if activated else kind
        raise UnsupportedModelError(
            f"a {kind} adapter works around the model's forward, not in its layers: use model.generate(), or an "
            "adapter of the layers such as LoRA"
        )


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its input: where its weights are, or are brought to (accelerate's offloading)."""
    device = model.device
    if device.type != "meta":
        return device  # type: ignore[return-value]
    for module in model.modules():
        target = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if target is not None:
            return torch.device(target)
    return device  # type: ignore[return-value]


def num_layers(model: PreTrainedModel) -> int:
    """L, the number of decoder layers; the exit layers of the model are 1 .. L-1."""
    return model.config.get_text_config(decoder=True).num_hidden_layers


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers, in order."""
    return list(model.get_submodule(".".join(anatomy(model).layers_path)))  # type: ignore[call-overload]


def _num_positions(model: PreTrainedModel) -> int | None:
    """The config's number, where the decoder has a table of about as many rows: learned ones are an embedding (some
    models leave its first two rows unused), others a buffer."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    decoder, words = model.get_decoder() or model, model.get_input_embeddings()
    if limit is None:
        return None
    tables = [m for m in decoder.modules() if isinstance(m, nn.Embedding) and m is not words]
    learned = any(limit <= table.num_embeddings <= limit + 2 for table in tables)
    fixed = any(buffer.dim() == 2 and len(buffer) == limit for buffer in decoder.buffers())
    return limit if learned or fixed else None


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder: only decoder-only models can draft early")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps a recurrent state, which cannot be rolled back")
    if not {"cache", "past_key_values"} & set(inspect.signature(type(model).forward).parameters):
        raise UnsupportedModelError(f"{name} keeps no keys and values between calls, so there is nothing to draft on")
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name} shares keys and values between layers, so stages would miss them")
    for layer in DynamicCache(config=text_config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"{name} has a layer whose state is a {type(layer).__name__}: only attention's keys and "
                "values can be rolled back"
            )


def _sights(config: PreTrainedConfig, count: int) -> tuple[Sight, ...]:
    """As transformers' `create_masks_for_generate` reads a config: by layer type, else one for all layers."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    by_type = {"sliding_attention": Sight(window=window), "chunked_attention": Sight(chunk=chunk)}
    types = getattr(config, "layer_types", None)
    if types is not None:
        return tuple(by_type.get(layer_type, Sight()) for layer_type in types)
    return (Sight(window=window) if window is not None else Sight(chunk=chunk),) * count


def _find_layers(model: PreTrainedModel) -> tuple[tuple[str, ...], int]:
    """Path and length of the decoder's layer list: the list as long as the text config says."""
    count = num_layers(model)
    if count < 2:
        raise UnsupportedModelError(f"{type(model).__name__} has {count} layer: none can draft for the rest")
    names = {id(module): name for name, module in model.named_modules()}
    for root in (model.get_decoder(), model):  # the decoder first: another tower may have as many layers
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in names:
                return tuple(names[id(module)].split(".")), count
    raise UnsupportedModelError(f"{type(model).__name__}: found no list of its {count} decoder layers")
