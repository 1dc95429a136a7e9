"""One torch thread (on two cores, two threads make tiny models seven times slower), no network, tiny models."""

import os
import shlex
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled", OMP_NUM_THREADS="1")

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests import documents, runs, tiny

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


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory):
    """Trains configs/tiny.yaml for three steps on forty short documents, with overrides; returns the run's folder."""
    from train.command import load_config
    from train.loop import train

    text = runs.documents(tmp_path_factory.mktemp("text") / "text.jsonl")

    def run(*overrides: str, folder: Path | None = None) -> Path:
        folder = folder or tmp_path_factory.mktemp("run")
        settings = [*text, "data.evaluation_blocks=1", "optim.max_steps=3", "optim.warmup_steps=0"]
        assert train(load_config(runs.TINY, [*settings, f"run.output_dir={folder}", *overrides])) == 0
        return folder

    return run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """A finished run of configs/tiny.yaml, trained through the real door."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    documents.run(f"accelerate launch train configs/tiny.yaml run.output_dir={shlex.quote(str(folder))}")
    return folder
