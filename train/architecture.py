"""The shape of the model to train: its transformers config, checked against the other settings before any weight is
read or made."""

from typing import TYPE_CHECKING, Any

import torch

from layerskip.model.anatomy import UnsupportedModelError, anatomy
from train.config import TrainConfig
from train.errors import ConfigError, TrainingError, cannot_load, first_line
from train.model_config import ModelConfig
from train.parsing import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_model_config(config: TrainConfig) -> "PretrainedConfig":
    """The transformers config of the model, checked against the sequence length and the recipe.

    Raises `TrainingError` if it cannot be found, `ConfigError` if something does not fit; no weights are
    read.
    """
    if config.model.architecture:
        model_config = _from_architecture(config.model.architecture)
    else:
        model_config = load_model_config(str(config.model.name_or_path))
    _check_family(model_config, config.model)
    text = model_config.get_text_config()
    positions = num_positions(model_config)
    if positions is not None and config.data.sequence_length > positions:
        raise ConfigError(
            f"data.sequence_length is {config.data.sequence_length}; the model has {positions} positions "
            "(max_position_embeddings): lower it"
        )
    if text.num_hidden_layers < 2:
        raise ConfigError(f"the model's num_hidden_layers is {text.num_hidden_layers}; an exit needs at least 2")
    try:
        config.recipe.check(text.num_hidden_layers)
    except ValueError as error:
        raise ConfigError(f"recipe: {error}") from None
    return model_config


def num_positions(model_config: "PretrainedConfig") -> int | None:
    """How many tokens, prompt included, the model takes; None if there is no end to them."""
    positions: int | None = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return positions


def load_model_config(name: str) -> "PretrainedConfig":
    """The transformers config in a local folder or Hub repository; `TrainingError` if it cannot be loaded."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TrainingError(cannot_load("model.name_or_path", name, error)) from None


def _check_family(model_config: "PretrainedConfig", settings: ModelConfig) -> None:
    """Raise `ConfigError` unless a model without weights can be built of it, and is one that can draft early."""
    from transformers import AutoModelForCausalLM

    family = model_config.model_type
    _check_is_causal(model_config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, **attention_choice(settings))
    except Exception as error:  # each family fails in its own way
        if settings.attn_implementation and isinstance(error, ValueError | ImportError):
            raise ConfigError(
                f"model.attn_implementation is {settings.attn_implementation!r}: {first_line(error)}"
            ) from None
        if settings.architecture and "meta" not in str(error):
            raise ConfigError(f"model.architecture does not fit {family}: {_said(error)}") from None
        return  # whatever is wrong with it, building it with weights will say
    if model_config.get_text_config().num_hidden_layers > 1:  # of fewer our caller speaks
        try:
            anatomy(model)
        except UnsupportedModelError as error:
            raise ConfigError(f"the model is a {family}, which cannot be trained to draft: {error}") from None


def _check_is_causal(model_config: "PretrainedConfig") -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING or model_config.is_encoder_decoder:
        family = model_config.model_type
        raise ConfigError(f"the model is a {family}, no decoder-only causal LM: only those can draft early")


def _from_architecture(architecture: dict[str, Any]) -> "PretrainedConfig":
    """A config from its settings. transformers would keep a misspelt key and ignore it: an error here."""
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = dict(architecture)
    model_type = str(settings.pop("model_type"))
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, list(CONFIG_MAPPING.keys()))
        raise ConfigError(f"model.architecture.model_type is {model_type!r}; transformers has no such family{hint}")
    known = AutoConfig.for_model(model_type)
    _check_is_causal(known)
    for key in settings:
        if not hasattr(known, key):
            hint = nearest(key, list(vars(known)))
            raise ConfigError(f"unknown key model.architecture.{key} for model_type {model_type}{hint}")
    try:
        made = AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # each family checks in its own way, some by errors of huggingface_hub's
        raise ConfigError(f"model.architecture does not fit {model_type}: {_said(error)}") from None
    heads, shared = (getattr(made, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and shared is not None and (shared < 1 or heads % shared):  # transformers finds out in the first forward
        raise ConfigError(
            f"model.architecture.num_key_value_heads is {shared}; it must divide num_attention_heads ({heads})"
        )
    return made


def _said(error: Exception) -> str:
    """All that an error says, in one line; of a KeyError the key alone would say nothing."""
    said = " ".join(str(error).split())
    return f"{said} is unknown" if isinstance(error, KeyError) else said


def fit_vocabulary(model_config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase", config: TrainConfig) -> None:
    """From scratch, give the model the tokenizer's size and special tokens; else check that its ids all fit.

    Raises `ConfigError` if the tokenizer has more tokens than the model's embedding has rows.
    """
    text = model_config.get_text_config()
    if config.model.architecture:
        if "vocab_size" not in config.model.architecture:
            text.vocab_size = len(tokenizer)
        for name in _TOKEN_IDS:
            if name not in config.model.architecture:
                setattr(text, name, getattr(tokenizer, name))
    if len(tokenizer) > text.vocab_size:
        way_out = "use the model's own tokenizer, or lower tokenizer.train_vocab_size"
        if config.model.architecture:
            way_out = "leave out model.architecture.vocab_size: it follows from the tokenizer"
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {text.vocab_size}: {way_out}"
        )


def attention_choice(settings: ModelConfig) -> dict[str, str]:
    """The keyword of transformers for `model.attn_implementation`, where it is set."""
    chosen = settings.attn_implementation
    return {"attn_implementation": chosen} if chosen else {}
