"""A checkpoint for others: its draft as a model of its own, or its exit for transformers' own early exit.

The draft is the embedding, the first E layers, the final norm and the head: an ordinary checkpoint with the same
tokenizer, which any engine takes as the draft model of the checkpoint it was cut from. It is the exit itself, logit
for logit; what such engines cannot have is its keys, values and hidden states being the target's own.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from layerskip.checkpoint.settings import KEY
from layerskip.checkpoint.whole_files import read_json, write_json
from layerskip.model.adapters import adapter_at, num_blocks
from layerskip.model.anatomy import UnsupportedModelError, anatomy, decoder_layers, device_of, unwrap
from layerskip.model.exit_layers import ExitAdapter, ExitBlocks
from layerskip.model.exit_number import check_exit_layer
from layerskip.model.self_check import SELF_CHECK_TOLERANCE
from layerskip.model.stages import Stages
from layerskip.model.views import with_layers
from layerskip.share.folding import fold_adapter

_HALF_TOLERANCE = 2e-2  # in half precision, where another kernel or order of steps is another rounding
# What transformers' own assisted decoding reads from a generation config.
_EARLY_EXIT = ("assistant_early_exit", "num_assistant_tokens", "num_assistant_tokens_schedule")


def export_draft(
    model: nn.Module, exit_layer: int, folder: str | os.PathLike[str], num_draft_tokens: int | None = None
) -> PreTrainedModel:
    """Write the draft of `model` into `folder`, in the model's dtype; its tokenizer is to be saved beside it.

    What was written is loaded again and must give the exit's logits. An exit's blocks are its last layers; a low-rank
    adapter becomes one more where that is exact (see `folding`). The head is whole, whatever draft vocabulary
    there is.

    Args:
        model: a decoder-only causal LM in eval mode.
        exit_layer: E, 1 .. L-1.
        folder: made if it is not there.
        num_draft_tokens: most tokens transformers drafts with it a step; None: transformers' default.

    Returns:
        The draft, as loaded from the folder.

    Raises:
        UnsupportedModelError: if the draft is no model of the same kind; nothing is left behind.
        ValueError: if `exit_layer` is out of range.
    """
    model = unwrap(model)
    stages = Stages(model, check_exit_layer(exit_layer, anatomy(model).num_layers))
    config: PreTrainedConfig = copy.deepcopy(model.config)  # type: ignore[arg-type]
    layers = decoder_layers(model)[:exit_layer]
    adapter = adapter_at(model, exit_layer)
    _cut(config.get_text_config(decoder=True), exit_layer + num_blocks(model, exit_layer))
    if isinstance(adapter, ExitBlocks):
        layers = [*layers, *adapter.layers]
    elif isinstance(adapter, ExitAdapter):
        layers = fold_adapter(layers, adapter, config.get_text_config(decoder=True))
        _lengthen(config.get_text_config(decoder=True))
    draft: Any = with_layers(model, anatomy(model).layers_path, layers)
    config.__dict__.pop(KEY, None)
    draft.config, draft.generation_config = config, _draft_generation_config(model, num_draft_tokens)
    folder = Path(folder)
    new = not folder.exists()
    draft.save_pretrained(folder)
    try:
        return _checked(folder, model, stages)
    except UnsupportedModelError:
        if new:
            shutil.rmtree(folder)
        raise


def _cut(config: PreTrainedConfig, exit_layer: int) -> None:
    """Keep of every list with an entry for each layer the first E, and of every list of layers those below E."""
    num_layers = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if not isinstance(value, list) or "token" in name or name == "architectures":
            continue
        if len(value) == num_layers:
            setattr(config, name, value[:exit_layer])
        elif "layer" in name and all(type(entry) is int for entry in value):
            setattr(config, name, [entry for entry in value if entry < exit_layer])
    config.num_hidden_layers = exit_layer


def _lengthen(config: PreTrainedConfig) -> None:
    """Room for one more layer, of the last one's kind."""
    num_layers = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and "layer" in name and len(value) == num_layers:
            setattr(config, name, [*value, value[-1]])
    config.num_hidden_layers = num_layers + 1


def _draft_generation_config(model: PreTrainedModel, num_draft_tokens: int | None) -> GenerationConfig:
    config = copy.deepcopy(model.generation_config)
    config.__dict__.pop(KEY, None)
    config.assistant_early_exit = None
    if num_draft_tokens:
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_draft_tokens, "constant"
    return config


@torch.no_grad()
def _checked(folder: Path, model: PreTrainedModel, stages: Stages) -> PreTrainedModel:
    """The draft in `folder`, which must give the logits of the exit of `stages`."""
    name = type(model).__name__
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = torch.arange(3, 27, device=device_of(model)).remainder(vocab_size)[None]  # (1, 24)
    expected, _ = stages.draft(token_ids, stages.new_cache(32), logits_to_keep=token_ids.shape[1])
    assert expected is not None
    try:
        draft = AutoModelForCausalLM.from_pretrained(
            folder, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
        actual = draft.to(token_ids.device).eval()(input_ids=token_ids, use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModelError(
            f"{name} with {stages.exit_layer} layers is no model that loads: {reason}"
        ) from error
    relative = float((actual.float() - expected.float()).norm() / expected.float().norm())
    limit = SELF_CHECK_TOLERANCE if model.dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
    if not relative <= limit:
        raise UnsupportedModelError(
            f"{name}: a model of its first {stages.exit_layer} layers does not give the exit's logits (relative error "
            f"{relative:.1e}, limit {limit:.0e}), so it cannot draft by itself"
        )
    return draft  # type: ignore[no-any-return]


@torch.no_grad()
def check_early_exit(model: PreTrainedModel, exit_layer: int, num_new: int = 12) -> None:
    """Raise unless transformers' own early exit decodes `model`, and in float32 as plain decoding does.

    Raises:
        UnsupportedModelError: with what happened.
    """
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = torch.arange(3, 11, device=device_of(model)).remainder(vocab_size)[None]  # (1, 8)
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(token_ids), "max_new_tokens": num_new}
    arguments |= {"do_sample": False, "eos_token_id": None}
    expected = model.generate(token_ids, **arguments)
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    try:
        actual = model.generate(token_ids, assistant_early_exit=exit_layer, **arguments)
    except Exception as error:  # whatever it dies of
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UnsupportedModelError(f"transformers' own early exit does not work with {name} ({reason})") from error
    finally:
        config.num_hidden_layers = num_layers  # which it leaves cut when it fails
    if model.dtype == torch.float32 and not torch.equal(actual, expected):
        raise UnsupportedModelError(f"transformers' own early exit changes the output of {name}: do not use it")


def carries_early_exit(folder: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint in `folder` asks for transformers' own early exit."""
    return bool(read_json(Path(folder) / "generation_config.json").get(_EARLY_EXIT[0]))


def write_early_exit(folder: str | os.PathLike[str], exit_layer: int | None, num_draft_tokens: int | None) -> Path:
    """Have plain transformers draft with the first layers of the checkpoint in `folder` whenever it generates.

    Args:
        exit_layer: None takes it out again.
        num_draft_tokens: None is transformers' default.

    Returns:
        generation_config.json, written whole or not at all; all else there stays.
    """
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    else:
        stored = json.loads(GenerationConfig.from_pretrained(folder, config_file_name="config.json").to_json_string())
    stored = {name: value for name, value in stored.items() if name not in (*_EARLY_EXIT, "_from_model_config")}
    if exit_layer is not None:
        tokens = (num_draft_tokens, "constant") if num_draft_tokens else (None, None)
        values = dict(zip(_EARLY_EXIT, (exit_layer, *tokens), strict=True))
        stored |= {name: value for name, value in values.items() if value is not None}
    return write_json(path, stored)
