"""Load a model with its tokenizer, checking first what can be checked from their small files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants
from huggingface_hub.utils import get_session
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from infer.errors import InputError, first_line
from infer.options import ModelOptions
from infer.source import check_exits, local_folder
from infer.speculation import Auto, Tuned
from layerskip.checkpoint.vocabulary import find_draft_vocabulary
from layerskip.model.adapters import adapters_of, find_adapters
from layerskip.model.machine import fast_dtype
from layerskip.model.stages import Stages

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode on its device, and the tokenizer whose ids it knows."""

    name: str  # as it was asked for
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"

    @property
    def max_positions(self) -> int | None:
        """Positions that prompt and output may take together; None if the model sets no limit."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def padding(self) -> int:
        """The token that fills rows up; which one it is does not matter, since nothing looks at it."""
        known = (self.tokenizer.pad_token_id, self.model.generation_config.pad_token_id, 0)
        return next(token for token in known if token is not None)


def load(
    options: ModelOptions, exit_layers: Sequence[int | Auto | Tuned | None] = (), needs_vocabulary: bool = True
) -> Loaded:
    """Load what `options` names; `exit_layers` are those it will be asked to decode with.

    Args:
        needs_vocabulary: whether a draft vocabulary that the checkpoint names must be there.

    Raises:
        InputError: with the reason, before the weights are read wherever the reason is known by then.
    """
    folder = local_folder(options.model)
    source, where = str(folder or options.model), {"local_files_only": folder is not None or not _hub_answers()}
    logging.disable_progress_bar()  # its bars would stand between our lines
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _device(options.device)
    config = _read(options.model, "a model configuration", AutoConfig.from_pretrained, source, **where)
    check_exits(exit_layers, config.get_text_config(decoder=True).num_hidden_layers)
    _check_companions(config, needs_vocabulary)
    tokenizer = _read(options.model, "a tokenizer", AutoTokenizer.from_pretrained, source, **where)
    _check_vocabulary(config, tokenizer)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    read = AutoModelForCausalLM.from_pretrained
    model = _read(options.model, "a causal language model", read, source, config=config, dtype=dtype, **where)
    if options.dtype == "auto" and device.type == "cpu" and fast_dtype(device) == torch.float32:
        model = model.float()  # half precision would be emulated here, and several times slower
    model = model.to(device).eval()
    _name_padding(model)
    try:
        adapters_of(model)
        for exit_layer in exit_layers:
            Stages(model, exit_layer if isinstance(exit_layer, int) else None)
    except ValueError as error:  # the library's refusal of a model it cannot cut, or of its adapters
        raise InputError(str(error)) from None
    return Loaded(options.model, model, tokenizer)


def _name_padding(model: "PreTrainedModel") -> None:
    """Nothing is ever padded here, but transformers warns at every call if no token is named for it."""
    config = model.generation_config
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = end[0] if isinstance(end, list) else end


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = shorten(first_line(error), 90)
        raise InputError(f"--device {name} cannot be used here ({reason}): leave it out, or give cpu") from None
    return device


def _read(name: str, what: str, read: Any, source: str, **arguments: Any) -> Any:
    """Call one of transformers' `from_pretrained`, its many kinds of failure made one."""
    try:
        return read(source, **arguments)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        if os.path.isdir(source):
            raise InputError(f"{name} holds no usable {what.partition(' ')[2]}: {first_line(error)}") from None
        if arguments.get("local_files_only") and isinstance(error, OSError):
            reason = f"found no folder {name} here, and the Hub cannot be reached: its cache has no {name}"
        else:
            reason = f"found no folder {name} here and cannot load {what} {name} from the Hub: {first_line(error)}"
        raise InputError(reason) from None


def _hub_answers() -> bool:
    """Whether the Hub can be reached: asked once, where transformers would ask six times for each file."""
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # no name server, no route, offline mode, a proxy that refuses
        return False
    return True


def _check_companions(config: "PretrainedConfig", needs_vocabulary: bool) -> None:
    try:
        find_adapters(config)
        if needs_vocabulary:
            find_draft_vocabulary(config)
    except OSError as error:
        raise InputError(str(error)) from None


def _check_vocabulary(config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> None:
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if rows is not None and len(tokenizer) > rows:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's embeddings only {rows}: "
            "put the model's own tokenizer beside it"
        )
