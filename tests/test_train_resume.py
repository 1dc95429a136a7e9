"""What a killed, stopped or failed run leaves behind, and that it goes on as if nothing had been."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.runs import ROOT, TINY, assert_same_weights, documents, metrics, wait_until
from train import checkpoint, disk
from train.checkpoint import half_written, latest_checkpoint
from train.command import load_config
from train.errors import TrainingError
from train.interrupts import Interrupts
from train.loop import train

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
CPU_2 = ["--config_file", str(ROOT / "configs" / "accelerate" / "cpu-2.yaml")]

# All that is random or depends on the step: two kinds of dropout, exits that change, the model's own text.
RANDOM = ["model.architecture.attention_dropout=0.1", "recipe.max_dropout=0.5", "recipe.exits=[1,2,3]"]
RANDOM += ["data.own_text=0.4", "data.own_text_rows=6", "optim.max_steps=10", "every.save=5"]
CURRICULA = {
    "rotational": ["recipe.curriculum=rotational", "recipe.curriculum_stride=3"],
    "gradual": ["recipe.curriculum=gradual", "recipe.dropout_time=rising"],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Overrides for forty short documents."""
    return [*documents(tmp_path_factory.mktemp("text") / "text.jsonl"), "every.log=1", "every.evaluate=1000"]


def execute(command: list[str], folder: Path, *overrides: str, **options) -> subprocess.CompletedProcess:
    arguments = [*command, str(TINY), f"run.output_dir={folder}", *overrides]
    options = {"capture_output": True, "text": True, "check": False, "timeout": 900} | options
    return subprocess.run(arguments, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options)


def start(folder: Path, *overrides: str) -> int:
    """Train in this process."""
    return train(load_config(TINY, [f"run.output_dir={folder}", *overrides]))


def losses(folder: Path) -> list[dict]:
    """Of every step, the exits' too."""
    kept = ("step", "loss", "last", "exits", "gradient_norm", "learning_rate", "tokens")
    return [{key: r[key] for key in kept if key in r} for r in metrics(folder)]


def assert_same_run(first: Path, second: Path) -> None:
    """Bit for bit: every step's losses, the weights, the optimizer."""
    assert losses(first) == losses(second)
    assert_same_weights(first, second)
    states = [torch.load(latest_checkpoint(folder) / "optimizer.pt") for folder in (first, second)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "curriculum"), [("step:7", "rotational"), ("write:10", "gradual")])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, text, capsys, moment, curriculum):
    options = [*text, *RANDOM, *CURRICULA[curriculum]]
    killed = tmp_path / "killed"
    result = execute([sys.executable, "-m", "tests.killed_run", moment], killed, *options)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert latest_checkpoint(killed).name == "step-000005"  # whole, whatever was going on
    assert [path.name for path in half_written(killed)] == ["step-000010.partial"] * (moment == "write:10")
    assert start(killed, *options) == 0
    said = capsys.readouterr().out
    assert f"resumed from {killed}/checkpoints/step-000005" in said
    assert (f"ignored the half-written checkpoint {killed}/checkpoints/step-000010.partial" in said) == (
        moment == "write:10"
    )
    assert half_written(killed) == []
    assert start(tmp_path / "whole", *options) == 0
    assert len({tuple(record["exits"]) for record in losses(killed)}) > 2
    assert any("last" not in record for record in losses(killed))  # a step on the model's own text
    assert_same_run(tmp_path / "whole", killed)


@pytest.mark.slow
def test_two_killed_processes_go_on_bit_for_bit(tmp_path, text):
    options = [*text, *RANDOM, *CURRICULA["rotational"]]
    killed = execute([*LAUNCH, *CPU_2, "-m", "tests.killed_run", "step:7"], tmp_path / "killed", *options)
    assert killed.returncode != 0
    assert latest_checkpoint(tmp_path / "killed").name == "step-000005", killed.stderr
    for name in ("killed", "whole"):
        result = execute([*LAUNCH, *CPU_2, "train"], tmp_path / name, *options)
        assert result.returncode == 0, result.stderr
        assert ("resumed from" in result.stdout) == (name == "killed")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


# A full disk


def raising(error: Exception):
    def fail(*args, **kwargs):
        raise error

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES = {
    "weights": ("transformers.PreTrainedModel.save_pretrained", SafetensorError("I/O error: No space left on device")),
    "optimizer": ("torch.save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")),
    "state": ("train.checkpoint._write_state", FULL),
    "flush": ("train.checkpoint.flush", FULL),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_full_disk_leaves_the_checkpoint_before_it_whole(tmp_path, text, monkeypatch, what):
    options = [*text, "optim.max_steps=6", "every.save=3"]
    save, saved = checkpoint.save_checkpoint, []

    def fill_the_disk_after_the_first(*args, **kwargs):
        if saved:
            monkeypatch.setattr(*FAILURES[what][:1], raising(FAILURES[what][1]))
        saved.append(save(*args, **kwargs))
        return saved[-1]

    with monkeypatch.context() as patch:
        patch.setattr("train.loop.save_checkpoint", fill_the_disk_after_the_first)
        with pytest.raises(TrainingError) as caught:
            start(tmp_path / "run", *options)
    message = str(caught.value)
    assert message.startswith(f"cannot write {tmp_path}/run/checkpoints/step-000006.partial (")
    assert message.endswith(
        " GB are free there); the checkpoints before it are whole: make room, and the same command goes on from the "
        "last one"
    )
    assert "\n" not in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"


def test_what_is_not_about_writing_keeps_its_traceback(tmp_path, text, monkeypatch):
    monkeypatch.setattr("torch.save", raising(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        start(tmp_path, *text, "optim.max_steps=1", "optim.warmup_steps=0")


@pytest.mark.slow
def test_a_file_that_the_system_refuses_to_grow(tmp_path, text):
    """The same in a process of its own with a real limit: one line, exit code 1, and the way out is true."""
    options = [*text, "optim.max_steps=6", "every.save=3", "optim.schedule=constant"]
    assert start(tmp_path / "run", *options, "optim.max_steps=3") == 0
    limit = (latest_checkpoint(tmp_path / "run") / "optimizer.pt").stat().st_size - 1000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = execute([sys.executable, "-m", "train"], tmp_path / "run", *options, preexec_fn=limited)
    assert result.returncode == 1
    errors = result.stderr.splitlines()
    assert errors[-1].startswith(f"error: cannot write {tmp_path}/run/checkpoints/step-000006.partial")
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    assert start(tmp_path / "run", *options) == 0
    assert start(tmp_path / "whole", *options) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_disk_holds_a_checkpoint_before_it_has_its_name(tmp_path, text, monkeypatch):
    """Every file is synced, then the folder, then it is renamed, then the folder above is synced."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noting_replace(source, target) -> None:
        if Path(target).parent.name == "checkpoints":
            done.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(disk.os, "fsync", noting_fsync)
    monkeypatch.setattr(checkpoint.os, "replace", noting_replace)
    assert start(tmp_path, *text, "optim.max_steps=1", "optim.warmup_steps=0") == 0
    files = {path.name for path in (tmp_path / "checkpoints" / "step-000001").rglob("*") if path.is_file()}
    rename = done.index("rename step-000001")
    assert {entry.removeprefix("sync ") for entry in done[: rename - 1]} >= files
    assert done[rename - 1 : rename + 2] == ["sync step-000001.partial", "rename step-000001", "sync checkpoints"]


# Signals


def test_a_signal_that_comes_twice_at_once_is_one():
    """torchrun passes on the Ctrl-C that the terminal sent to all."""
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.poll() == signal.SIGINT


@pytest.fixture
def python_interrupts():
    """Python's own answer to SIGINT, which a background job of a shell is started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
def test_a_second_ctrl_c_acts_at_once(monkeypatch):
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        later = time.monotonic() + 10
        monkeypatch.setattr("train.interrupts.time.monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.poll() == signal.SIGINT


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_two_processes_and_saves(tmp_path, text):
    """A terminal signals the launcher and both processes; the launcher then signals the processes again."""
    command = [*LAUNCH, *CPU_2, "train", str(TINY), f"run.output_dir={tmp_path}", *text]
    command += ["optim.max_steps=100000", "every.save=100000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_until(lambda: len(metrics(tmp_path)) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert "the same command goes on from there" in output
    assert latest_checkpoint(tmp_path) is not None
