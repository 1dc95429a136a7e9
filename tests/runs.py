"""What tests of `train` share: a text to train on, the settings that read it, and looking at what a run left."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "tiny.yaml"
WORDS = ["def", "return", "class", "value", "index", "self", "import", "raise", "yield", "lambda"]


def documents(path: Path) -> list[str]:
    """Write forty short documents to `path`, a .jsonl, whose groups do not depend on its place; returns the overrides
    of configs/tiny.yaml that read them."""
    random = np.random.default_rng(0)
    path.write_text("\n".join(json.dumps({"text": " ".join(random.choice(WORDS, 200))}) for _ in range(40)))
    source = ["data.standard_library=false", "data.max_documents=null", f"data.path={path}"]
    return [*source, "tokenizer.train_vocab_size=300", "data.evaluation_blocks=2"]


def metrics(folder: Path, kind: str = "train") -> list[dict]:
    """The records of one kind that a run has logged so far."""
    path = folder / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [record for record in records if record["kind"] == kind]


def assert_same_weights(first: Path, second: Path, **tolerance: float) -> None:
    """Of two checkpoints: bit for bit, unless a tolerance is given."""
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **(tolerance or {"rtol": 0, "atol": 0}))


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen) -> None:
    """Until a program has come so far; an AssertionError with its output if it ends before, or hangs for minutes."""
    deadline = time.monotonic() + 600
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.02)
