"""The sections `model` and `tokenizer`: what is trained, and what its text is cut into."""

from dataclasses import dataclass, field
from typing import Any, Literal

from train.errors import check, check_at_least, check_at_most


@dataclass(frozen=True)
class ModelConfig:
    """The model: a checkpoint to continue from, or an architecture to train from scratch."""

    name_or_path: str | None = None  # local folder or Hub id of the checkpoint to continue from
    architecture: dict[str, Any] = field(default_factory=dict)  # from scratch: transformers settings
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # arithmetic; auto: bfloat16 where this machine has it
    save_dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # weights of the finished checkpoint; auto: as dtype
    attn_implementation: str | None = None  # transformers' attention: sdpa, eager, flash_attention_2, ...
    gradient_checkpointing: bool = False  # recompute activations: less memory, about a third slower
    compile: bool = False  # torch.compile each layer: slow to start, faster afterwards on GPUs
    lora_rank: int | None = None  # train a low-rank update of this rank (PEFT) and no other weights; merged when saved
    lora_alpha: int | None = None  # the update is scaled by lora_alpha / lora_rank; left out, 2 x lora_rank
    lora_targets: tuple[str, ...] = ()  # names of the layers to update; left out, all linear layers but the head

    def __post_init__(self) -> None:
        given = (self.name_or_path is not None) + bool(self.architecture)
        check(
            given == 1,
            f"model.name_or_path, model.architecture: give one; {'both' if given else 'neither'} given",
        )
        check(
            not self.architecture or "model_type" in self.architecture,
            "model.architecture has no model_type; name the family, for example model_type: llama",
        )
        check_at_least("model", self, {"lora_rank": 1, "lora_alpha": 1})
        for name in ("lora_alpha", "lora_targets"):
            value = getattr(self, name)
            check(
                self.lora_rank is not None or not value,
                f"model.{name} is {value}, which says nothing without model.lora_rank: give that, or leave it out",
            )
        check(
            self.lora_rank is None or not self.architecture,
            f"model.lora_rank is {self.lora_rank}: it updates a trained model; give model.name_or_path or leave it out",
        )


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer: the checkpoint's own unless said otherwise."""

    name_or_path: str | None = None  # local folder or Hub id; left out, the model's own
    train_vocab_size: int | None = None  # train a byte-level BPE of this many tokens on the training text
    chat_template: str | None = None  # file of a Jinja chat template that replaces the tokenizer's own

    def __post_init__(self) -> None:
        check(
            self.name_or_path is None or self.train_vocab_size is None,
            "tokenizer.name_or_path and tokenizer.train_vocab_size exclude each other: give one",
        )
        # 256 bytes and the end-of-text token are always there.
        check_at_least("tokenizer", self, {"train_vocab_size": 257})
        check_at_most("tokenizer", self, {"train_vocab_size": 1_000_000})  # beyond it the trainer takes all memory
