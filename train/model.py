"""The model to train: checked against the other settings from its config alone, then loaded or made."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerskip.model.anatomy import UnsupportedModelError, anatomy, decoder_layers
from layerskip.model.machine import fast_dtype
from train.config import TrainConfig
from train.errors import ConfigError, TrainingError, cannot_load, first_line
from train.parsing import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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
    _check_family(model_config)
    text = model_config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and config.data.sequence_length > positions:
        raise ConfigError(
            f"data.sequence_length is {config.data.sequence_length}; the model has {positions} positions "
            "(max_position_embeddings): lower it"
        )
    if text.num_hidden_layers < 2:
        raise ConfigError(f"the model has {text.num_hidden_layers} layer (num_hidden_layers); an exit needs at least 2")
    try:
        config.recipe.check(text.num_hidden_layers)
    except ValueError as error:
        raise ConfigError(f"recipe: {error}") from None
    return model_config


def load_model_config(name: str) -> "PretrainedConfig":
    """The transformers config in a local folder or Hub repository; `TrainingError` if it cannot be loaded."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TrainingError(cannot_load("model.name_or_path", name, error)) from None


def _check_family(model_config: "PretrainedConfig") -> None:
    """Raise `ConfigError` unless the family is one that can draft early, told from a model without any weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    family = model_config.model_type
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING or model_config.is_encoder_decoder:
        raise ConfigError(f"the model is a {family}, no decoder-only causal LM: only those can draft early")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
    except Exception:  # whatever is wrong with it, building it with weights will say
        return
    if model_config.get_text_config().num_hidden_layers > 1:  # of fewer our caller speaks
        try:
            anatomy(model)
        except UnsupportedModelError as error:
            raise ConfigError(f"the model is a {family}, which cannot be trained to draft: {error}") from None


def _from_architecture(architecture: dict[str, Any]) -> "PretrainedConfig":
    """A config from its settings. transformers would keep a misspelt key and ignore it: an error here."""
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = dict(architecture)
    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, list(CONFIG_MAPPING.keys()))
        raise ConfigError(f"model.architecture.model_type is {model_type!r}; transformers has no such family{hint}")
    known = AutoConfig.for_model(model_type)
    for key in settings:
        if not hasattr(known, key):
            hint = nearest(key, list(vars(known)))
            raise ConfigError(f"unknown key model.architecture.{key} for model_type {model_type}{hint}")
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # each family checks in its own way, some by errors of huggingface_hub's
        said = " ".join(str(error).split())
        raise ConfigError(f"model.architecture does not fit {model_type}: {said}") from None


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
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {text.vocab_size}: "
            "use the model's own tokenizer, or lower tokenizer.train_vocab_size"
        )


def build_model(config: TrainConfig, model_config: "PretrainedConfig", checkpoint: Path | None) -> "PreTrainedModel":
    """The model in float32, in training mode: from `checkpoint` if given, else as `config.model` says.

    Weights from scratch depend on `run.seed` alone, but that ZeRO-3 draws them in pieces, and so others.
    """
    # LoRA's own weights are put on top of the original later.
    source = (None if config.model.lora_rank else checkpoint) or config.model.name_or_path
    if source is None:
        torch.manual_seed(config.run.seed)
    model = load_model(config, model_config if source is None else str(source), torch.float32)
    if config.model.gradient_checkpointing:
        # Renamed in transformers 5.24; the old name warns there.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def load_model(config: TrainConfig, source: "str | PretrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    """The causal LM of a folder or Hub repository, or one with new weights from a transformers config.

    Raises `TrainingError` if it cannot be made.
    """
    from transformers import AutoModelForCausalLM

    attention = {"attn_implementation": config.model.attn_implementation} if config.model.attn_implementation else {}
    try:
        if isinstance(source, str):
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **attention)
        return AutoModelForCausalLM.from_config(source, dtype=dtype, **attention)
    except (OSError, ValueError, ImportError) as error:
        name = source if isinstance(source, str) else f"model.architecture ({source.model_type})"
        raise TrainingError(f"cannot build the model from {name!r}: {first_line(error)}") from None


def this_device() -> torch.device:
    """The accelerator of this machine, else its CPU."""
    return (torch.accelerator.is_available() and torch.accelerator.current_accelerator()) or torch.device("cpu")


def decide_dtypes(config: TrainConfig) -> TrainConfig:
    """The config with `model.dtype` and `model.save_dtype` of "auto" decided for this machine."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if fast_dtype(this_device()) == torch.bfloat16 else "float32"
    saved = dtype if config.model.save_dtype == "auto" else config.model.save_dtype
    return replace(config, model=replace(config.model, dtype=dtype, save_dtype=saved))


def compile_layers(model: "PreTrainedModel") -> None:
    """Have torch compile what every decoder layer computes, rows and lengths left open.

    Layer by layer and below the recipe's hooks, which stay as they are: they take rows out of the batch by number,
    which a compiled graph of the whole model could not hold.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]
