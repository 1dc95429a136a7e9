"""One torch thread (on two cores, two threads make tiny models seven times slower), no network, tiny models."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled", OMP_NUM_THREADS="1")

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests import tiny

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """Four layers, random weights, vocabulary 64, eval mode."""
    return tiny.llama()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens."""
    return tiny.tokenizer()


@pytest.fixture
def tiny_checkpoint(tmp_path, tokenizer):
    """Folder of a saved tiny Llama with its tokenizer."""
    folder = tmp_path / "checkpoint"
    tiny.llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
