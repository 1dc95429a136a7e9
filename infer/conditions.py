"""The conditions under which numbers were measured: without them they say nothing."""

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

_PACKAGES = ("torch", "transformers")


def conditions(model: PreTrainedModel) -> dict[str, Any]:
    """Machine, dtype, versions, commit and date, for JSON."""
    device = model.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "batch_size": 1,
        "compiled": False,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe(found: dict[str, Any]) -> str:
    """The same as one line for people."""
    device = found["cpu"] if found["device"] == "cpu" else f"{found['device']} ({found['cpu']})"
    batch = "" if found["batch_size"] is None else f", batch {found['batch_size']}"
    commit, _, dirty = (found["commit"] or "unknown").partition("-")
    return (
        f"{device}, {found['threads']} threads, {found['dtype']}{batch}, eager, torch {found['torch']}, "
        f"transformers {found['transformers']}, commit {commit[:12]}{dirty and '-' + dirty}"
    )


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
