"""The conditions under which numbers were measured: without them they say nothing."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_PACKAGES = ("torch", "transformers")
_OTHER_PACKAGES = ("tokenizers", "safetensors", "huggingface_hub", "numpy")


def conditions(model: PreTrainedModel) -> dict[str, Any]:
    """Machine, model, dtype, versions, commit and date, for JSON."""
    return {
        **_machine(model.device),
        **_model(model),
        "attention": model.config._attn_implementation,
        "batch_size": 1,
        "compiled": False,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "other_packages": {name: found for name in _OTHER_PACKAGES if (found := _version(name)) is not None},
        "commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # others' work counts too
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda": torch.version.cuda if on_gpu else None,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _model(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "architecture": type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "revision": getattr(model.config, "_commit_hash", None),  # of a Hub model
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(found: dict[str, Any]) -> str:
    """The same as one line for people."""
    device = found["cpu"] if found["device"] == "cpu" else f"{found['device']} ({found['cpu']})"
    batch = "" if found["batch_size"] is None else f", batch {found['batch_size']}"
    commit, _, dirty = (found["commit"] or "unknown").partition("-")
    asked = "".join(
        f", {word} {found[name]}"
        for name, word in (("seed", "seed"), ("prompts_fingerprint", "prompts"))
        if found.get(name) is not None
    )
    threads = f"{found['threads']} thread{'s' * (found['threads'] != 1)}"
    return (
        f"{device}, {threads}, {found['dtype']}{batch}, eager, torch {found['torch']}, "
        f"transformers {found['transformers']}, commit {commit[:12]}{dirty and '-' + dirty}{asked}"
    )


def fingerprint(prompts: Sequence[Tensor]) -> str:
    """The first 12 digits of the SHA-256 of the prompts' token ids, (1, length) each: equal for equal input alone."""
    ids = [prompt[0].tolist() for prompt in prompts]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def process_peak_bytes() -> int | None:
    """Most main memory that this process has held so far, weights and libraries included; None where the system does
    not say."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The checkout's commit, with `-dirty` if files differ from it; None outside a git checkout."""
    checkout = str(Path(__file__).resolve().parents[1])
    command = ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
