"""A reduced draft vocabulary: the draft's head has rows for the most frequent tokens only.

A head over 49,152 tokens costs a small model's draft as much as three of its layers do; one over the 8,192 most
frequent covers more than 99 % of ordinary text at a sixth of that. The output stays exact: q is 0 outside, which the
accept rules allow, and the target's p comes from the whole head. A token outside is never drafted, only emitted as
the model's own (a correction or a bonus).

The ids live beside the model's weights in a file of their own; `config.json` says that they are there
("layerskip": {"draft_vocabulary": {"size": n}}), as it does for exit adapters.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from layerskip.checkpoint.companion import find_companion
from layerskip.checkpoint.settings import KEY, carried
from layerskip.checkpoint.whole_files import replacing, write_json
from layerskip.model.anatomy import device_of

DRAFT_VOCABULARY_FILE = "draft_vocabulary.safetensors"
_NAME = "token_ids"  # of the file's only tensor


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Tensor:
    """How often each token occurs in `texts`, without the special tokens that begin and end them: (vocab,) int64."""
    counts = torch.zeros(len(tokenizer), dtype=torch.long)
    for text in texts:
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        counts += torch.bincount(torch.tensor(token_ids, dtype=torch.long), minlength=len(counts))
    return counts


def most_frequent(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The ids of a draft vocabulary of exactly `size` tokens; of tokens equally frequent, those with lower ids.

    Args:
        counts: (vocab,) of each token.
        size: not rounded; multiples of 64 suit GPUs.
        always: ids that are in whatever their count, such as the end-of-text token: a draft that cannot say it
            never drafts the end.

    Returns:
        (size,) int64, ascending, on the CPU.

    Raises:
        ValueError: if `size` is above the vocabulary's or below the number of `always`, or one of these no token.
    """
    vocab_size, kept = len(counts), sorted(set(always))
    if not max(1, len(kept)) <= size <= vocab_size:
        raise ValueError(f"size={size}: need {max(1, len(kept))} (tokens always in) to {vocab_size} (the vocabulary)")
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise ValueError(f"always holds {kept[0]} to {kept[-1]}, but token ids are 0 to {vocab_size - 1}")
    rank = counts.to("cpu", torch.long, copy=True)
    rank[kept] = torch.iinfo(torch.long).max
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """The share of counted tokens that are in the vocabulary: in such text, a draft is right no more often than this.

    Raises:
        ValueError: if nothing was counted.
    """
    total = int(counts.sum())
    if total == 0:
        raise ValueError("no tokens were counted: count some text first")
    return int(counts[token_ids].sum()) / total


def store_draft_vocabulary(folder: str | os.PathLike[str], token_ids: Tensor) -> Path:
    """Put a draft vocabulary into the folder of a saved model: its file, and then its mention in config.json.

    Each is written whole or not at all. A model that is loaded already does not see it.

    Args:
        token_ids: (n,) int64, ascending, each once.

    Returns:
        The file.

    Raises:
        FileNotFoundError: if the folder holds no config.json.
        ValueError: if the ids are not such, or not of this model.
    """
    folder = Path(folder)
    config_path, path = folder / "config.json", folder / DRAFT_VOCABULARY_FILE
    if not config_path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give the folder of a saved model")
    config: dict[str, Any] = json.loads(config_path.read_text(encoding="utf-8"))
    check_token_ids(
        token_ids, config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size"), "token_ids"
    )
    config[KEY] = {**(config.get(KEY) or {}), "draft_vocabulary": {"size": len(token_ids)}}

    with replacing(path) as partial:
        save_file({_NAME: token_ids.detach().cpu().contiguous()}, partial)
    write_json(config_path, config)
    return path


def save_draft_vocabulary(model: PreTrainedModel, folder: str | os.PathLike[str]) -> Path | None:
    """Beside `model.save_pretrained(folder)`, which writes the mention alone: write the model's own file as well.

    Training does not wear a draft vocabulary out: it belongs to the tokenizer and the kind of text.

    Returns:
        The file; None where the model has none.
    """
    token_ids = draft_vocabulary_of(model)
    return None if token_ids is None else store_draft_vocabulary(folder, token_ids)


_loaded: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


def draft_vocabulary_of(model: PreTrainedModel) -> Tensor | None:
    """The ids (n,) int64, ascending, that the model's checkpoint (folder or Hub repository) drafts with, on the
    model's device; None where its config names none. Read once a model.

    Raises:
        FileNotFoundError: if the config names a draft vocabulary but its file is not beside the weights.
        ValueError: if that file holds something else.
    """
    if not carried(model.config).get("draft_vocabulary"):
        return None
    if model not in _loaded:
        _loaded[model] = _load(model)
    if _loaded[model].device != device_of(model):
        _loaded[model] = _loaded[model].to(device_of(model))
    return _loaded[model]


def find_draft_vocabulary(config: PreTrainedConfig) -> Path | None:
    """The file of the draft vocabulary that a checkpoint's config names, None where it names none.

    Raises:
        FileNotFoundError: if it is not beside the checkpoint's weights.
    """
    way_out = 'copy it there, or take "draft_vocabulary" out of config.json'
    return find_companion(config, "draft_vocabulary", DRAFT_VOCABULARY_FILE, way_out)


def _load(model: PreTrainedModel) -> Tensor:
    path = find_draft_vocabulary(model.config)
    assert path is not None, "asked of a config that names one"
    size = carried(model.config)["draft_vocabulary"].get("size")
    try:
        token_ids = load_file(path)[_NAME]
    except (SafetensorError, KeyError):
        raise ValueError(f"{path} holds no draft vocabulary (a tensor {_NAME!r}): make it anew") from None
    check_token_ids(token_ids, model.config.get_text_config(decoder=True).vocab_size, str(path))
    if len(token_ids) != size:
        raise ValueError(
            f"{path} holds {len(token_ids)} token ids but config.json says {size}: copy the file that was saved with it"
        )
    return token_ids


def check_token_ids(token_ids: Tensor, vocab_size: int | None, where: str) -> None:
    """Raise ValueError unless these are int64 ids of the vocabulary (None: not known), ascending, each once.

    `where` they come from begins the message."""
    if token_ids.dtype != torch.long or token_ids.dim() != 1 or not len(token_ids):
        raise ValueError(
            f"{where}: a draft vocabulary is a list of int64 token ids, got {token_ids.dtype} of shape "
            f"{tuple(token_ids.shape)}"
        )
    if not bool((token_ids[1:] > token_ids[:-1]).all()):
        raise ValueError(f"{where}: token ids must ascend, each once: use most_frequent, or token_ids.unique()")
    low, high = int(token_ids[0]), int(token_ids[-1])
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise ValueError(
            f"{where}: holds token ids {low} to {high}, but the model's are 0 to {(vocab_size or 0) - 1}: "
            "make it with this model's tokenizer"
        )
