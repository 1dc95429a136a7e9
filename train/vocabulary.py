"""The tokenizer: the checkpoint's, another one's, or a byte-level BPE trained on the training text."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from train.config import TrainConfig
from train.errors import ConfigError, TrainingError, cannot_load, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"


def build_tokenizer(config: TrainConfig, training_texts: Iterable[str]) -> "PreTrainedTokenizerBase":
    """The run's tokenizer. `training_texts` is read only if `tokenizer.train_vocab_size` is set.

    Raises `TrainingError` if it cannot be loaded or has no end-of-text token (documents are joined with it).
    """
    template = config.tokenizer.chat_template
    text = _read_template(Path(template).expanduser()) if template is not None else None  # before minutes of training
    if config.tokenizer.train_vocab_size is not None:
        tokenizer = train_tokenizer(training_texts, config.tokenizer.train_vocab_size)
    else:
        name = config.tokenizer.name_or_path or config.model.name_or_path
        assert name is not None  # TrainConfig checks it
        tokenizer = load_tokenizer(name)
    if text is not None:
        tokenizer.chat_template = text
    return tokenizer


def _read_template(path: Path) -> str:
    """The chat template in a file. Raises `TrainingError` if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"tokenizer.chat_template: cannot read {path}: {first_line(error)}") from None


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer in a local folder or Hub repository; `TrainingError` as for `build_tokenizer`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TrainingError(cannot_load("the tokenizer", name, error)) from None
    if tokenizer.eos_token_id is None:
        raise TrainingError(
            f"the tokenizer {name!r} has no eos_token; documents are joined with it: set one and save it"
        )
    return tokenizer


def check_draft_vocabulary(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise `ConfigError` if `data.draft_vocabulary` is no part of the tokenizer's vocabulary."""
    size, least = config.data.draft_vocabulary, len(tokenizer.all_special_ids) + 1
    if size is not None and not least <= size < len(tokenizer):
        raise ConfigError(
            f"data.draft_vocabulary is {size}; the tokenizer has {len(tokenizer)} tokens, {least - 1} of them special: "
            f"choose {least} to {len(tokenizer) - 1}, or null for the whole head"
        )


def padding_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The id that fills rows up: the padding token, else the end-of-text token, which every tokenizer here has."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    assert isinstance(found, int)
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """A byte-level BPE of at most `vocab_size` tokens, the end-of-text token among them (id 0)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: nothing is ever unknown
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
