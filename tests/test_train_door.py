"""The program through its real doors, in processes of its own: launch, stop, resume, two processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import ROOT, TINY, assert_same_weights, documents, metrics, wait_until
from train.checkpoint import latest_checkpoint, read_progress
from train.command import load_config
from train.loop import train

LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
CPU_2 = ["--config_file", str(ROOT / "configs" / "accelerate" / "cpu-2.yaml"), "--main_process_port", "0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Overrides for forty short documents."""
    return [*documents(tmp_path_factory.mktemp("text") / "text.jsonl"), "every.log=1"]


def start(command: list[str], folder: Path, *overrides: str) -> subprocess.Popen:
    arguments = [*command, str(TINY), f"run.output_dir={folder}", *overrides]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until the run has logged optimizer step `step`."""
    wait_until(lambda: any(record["step"] >= step for record in metrics(folder)), process)


def test_accelerate_launch_train_as_the_readme_says(tmp_path):
    # The standard library's text, as in the file: the one run here that reads it.
    process = start([*LAUNCH, "train"], tmp_path / "run", "optim.max_steps=2", "every.log=1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "model.safetensors").is_file()
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert record["launches"][0]["argv"][0] == str(TINY)


def test_the_folder_may_be_run_from_anywhere(tmp_path):
    command = [sys.executable, str(ROOT / "train"), "--print-config", str(TINY)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "model_type: llama" in result.stdout


@pytest.mark.slow
def test_a_stopped_run_saves_and_goes_on_as_if_it_had_not_been_stopped(tmp_path, text):
    folder, options = tmp_path / "stopped", ["optim.max_steps=60", "every.evaluate=1000"]
    stopped_at = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        # Saving at every step makes the steps slow enough to be stopped between two of them.
        process = start([sys.executable, "-m", "train"], folder, *text, *options, "every.save=1")
        wait_for_step(folder, stopped_at + 2, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number, output
        before, stopped_at = stopped_at, read_progress(latest_checkpoint(folder)).step
        assert before < stopped_at < 60
        assert f"stopped after step {stopped_at}; the same command goes on from there" in output
        assert metrics(folder)[-1]["step"] == stopped_at

    for name in ("stopped", "whole"):
        assert train(load_config(TINY, [*text, *options, "every.save=60", f"run.output_dir={tmp_path / name}"])) == 0
    assert_same_weights(folder, tmp_path / "whole")
    assert [r["loss"] for r in metrics(folder)] == [r["loss"] for r in metrics(tmp_path / "whole")]


def test_a_run_whose_launcher_was_terminated_saves_and_stops(tmp_path, text):
    # `accelerate launch` dies of SIGTERM and leaves its one process running.
    process = start([*LAUNCH, "train"], tmp_path, *text, "optim.max_steps=100000", "every.save=100000")
    wait_for_step(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)  # until the orphan closes its output, too
    assert "the same command goes on from there" in output
    assert read_progress(latest_checkpoint(tmp_path)).step >= 2


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, text):
    # Twice the rows for one process: dropout is drawn by a row's place in the micro-batch of all processes.
    options = [*text, "optim.max_steps=4", "every.save=2", "recipe.self_distillation=0.5"]
    process = start([*LAUNCH, *CPU_2, "train"], tmp_path / "two", *options)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "MULTI_CPU over 2 processes" in output
    assert output.count("step 4/4") == 1  # only the first one speaks
    one = [*options, "optim.micro_batch_size=4", f"run.output_dir={tmp_path / 'one'}"]
    assert train(load_config(TINY, one)) == 0
    assert_same_weights(tmp_path / "one", tmp_path / "two", rtol=1e-4, atol=1e-5)
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["exits"] == pytest.approx(b["exits"], rel=1e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)


@pytest.mark.slow
def test_another_engine_than_the_launched_one_is_an_error(tmp_path):
    # What `accelerate launch --use_fsdp` sets; without a GPU accelerate trains without it and says nothing.
    environment = {**os.environ, "ACCELERATE_USE_FSDP": "true"}
    command = [sys.executable, "-m", "train", str(TINY), f"run.output_dir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if torch.accelerator.is_available():
        pytest.skip("FSDP is there")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: FSDP was asked for, but accelerate runs NO")
