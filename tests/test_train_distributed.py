"""Two processes train as one, whatever engine shares the model out: gradients, losses, dropped rows, checkpoint.

FSDP2 is PyTorch's `fully_shard` on the recipe itself: accelerate turns FSDP off where there is no GPU. ZeRO needs
DeepSpeed, which `make setup` leaves out (it adds seconds to every import of transformers); `scripts/check.sh` lays it
over the environment for this file.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from layerskip.forecast import measure_exits
from tests import engine_worker, tiny
from tests.engine_worker import NUM_LAYERS, STEPS, VARIANTS, batches
from train.command import load_config
from train.loop import train

ROOT = Path(__file__).resolve().parents[1]
TORCH, DEEPSPEED = ("ddp", "fsdp2"), ("zero1", "zero2", "zero3")
NAMES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP2"}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder of an engine's results; its group of engines is run once, in one pair of processes."""
    folder = tmp_path_factory.mktemp("engines")

    @cache
    def run(engines: tuple[str, ...], processes: int) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        started = []
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(processes)}
            environment = os.environ | (place | address if processes > 1 else {}) | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.engine_worker", str(folder), *engines]
            log = (folder / f"{engines[0]}-{rank}.log").open("w")
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        try:
            for process in started:
                process.wait(timeout=1800)  # a busy machine takes twenty times as long as an idle one
        finally:
            for process in started:
                process.kill()
        # Not the exit codes: DeepSpeed's processes sometimes end in "terminate called" when all is done.
        return "".join(path.read_text()[-3000:] for path in folder.glob(f"{engines[0]}-*.log"))

    def results_of(engine: str, variant: str) -> SimpleNamespace:
        group = next((group for group in (TORCH, DEEPSPEED) if engine in group), (engine,))
        output = run(group, 1 if engine == "plain" else 2)
        path = folder / engine / f"{variant}.pt"
        assert path.is_file(), output
        rows = [torch.load(rows) for rows in sorted(path.parent.glob(f"{variant}.rows-*.pt"))]
        return SimpleNamespace(**torch.load(path), rows=rows, checkpoint=path.with_suffix(""))

    return results_of


engines = pytest.mark.parametrize(
    "engine", [*TORCH, *(pytest.param(name, marks=needs_deepspeed) for name in DEEPSPEED)]
)
variants = pytest.mark.parametrize("variant", VARIANTS)


@engines
@variants
def test_gradients_and_losses_are_those_of_one_process(results, engine, variant):
    one, two = results("plain", variant), results(engine, variant)
    assert two.engine == NAMES.get(engine, "DEEPSPEED")
    assert two.gradients.keys() == one.gradients.keys()
    assert any(gradient.any() for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        # There is something to compare; but one exit's adapter rests in the first step, and of the other's, where it is
        # low-rank and new, `up` is 0, so that nothing reaches `down`.
        assert gradient.any() or VARIANTS[variant].recipe.has_adapters, name
        size = float(gradient.abs().max())
        torch.testing.assert_close(two.gradients[name], gradient, rtol=1e-5, atol=1e-5 * size, msg=name)
    assert len(one.losses) == STEPS
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert two.exits == one.exits


@engines
@variants
def test_each_row_drops_the_same_layers_and_each_process_calls_all_layers(results, engine, variant):
    [one], two = results("plain", variant).rows, results(engine, variant).rows
    assert [first + second for first, second in zip(*two, strict=True)] == one
    assert len(one) == STEPS * VARIANTS[variant].micro_steps * NUM_LAYERS


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant.recipe.max_dropout])
def test_some_micro_batches_are_dropped_whole_on_one_process(results, variant):
    assert any(all(first) != all(second) for first, second in zip(*results("ddp", variant).rows, strict=True))


def test_the_rotation_trains_other_exits_in_turn_and_leaves_the_last_layer_out(results):
    exits = results("plain", "rotating").exits
    assert len(set(exits)) > 3
    assert [NUM_LAYERS in active for active in exits] == [step not in (4, 6, 7) for step in range(STEPS)]


@engines
@variants
def test_the_checkpoint_is_an_ordinary_one(results, engine, variant):
    one, two = results("plain", variant), results(engine, variant)
    models = [AutoModelForCausalLM.from_pretrained(result.checkpoint).eval() for result in (one, two)]
    with torch.no_grad():
        logits = [model(batches(99)).logits for model in models]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    untrained = tiny.llama(num_layers=NUM_LAYERS, **VARIANTS[variant].model)
    frozen = VARIANTS[variant].recipe.freeze_model
    assert torch.equal(untrained(batches(99)).logits, logits[1]) == frozen
    # What was measured under the engine, exits and all, is what the checkpoint does.
    measured = {exit_layer: m.loss for exit_layer, m in measure_exits(models[1], [batches(99)]).items()}
    assert two.measured == pytest.approx(measured, rel=1e-5)
    assert two.measured == pytest.approx(one.measured, rel=1e-5)


# The program, through its launch configs


def launch(config: str, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", f"configs/accelerate/{config}.yaml", "--num_processes", "2", *launcher]
    command += ["train", "configs/tiny.yaml", f"run.output_dir={folder}", *arguments]
    log = folder.with_suffix(".log").open("a")
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def steps(folder: Path) -> list[float]:
    """The loss of every step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


@needs_deepspeed
def test_the_program_trains_resumes_and_finishes_under_zero3(tmp_path):
    options = ["optim.max_steps=4", "every.save=2", "every.keep=2", "every.log=1", "every.evaluate=1000"]
    assert train(load_config(engine_worker.CONFIG, [f"run.output_dir={tmp_path / 'base'}", "optim.max_steps=2"])) == 0
    # From weights that are there: ZeRO-3 would draw others, in pieces.
    base = shutil.copytree(tmp_path / "base" / "checkpoints" / "step-000002", tmp_path / "start")
    options += ["model.architecture={}", f"model.name_or_path={base}", "tokenizer.train_vocab_size=null"]
    one = tmp_path / "one"
    assert (
        train(load_config(engine_worker.CONFIG, [*options, f"run.output_dir={one}", "optim.micro_batch_size=4"])) == 0
    )
    two = tmp_path / "zero3"
    for part in ("whole", "resumed"):
        launch("zero3", two, *options, launcher=("--main_process_port", "0")).wait(timeout=1800)
        assert (two / "model.safetensors").is_file(), two.with_suffix(".log").read_text()[-3000:]
        assert steps(two) == pytest.approx(steps(one), rel=1e-5)
        weights, others = (load_file(folder / "model.safetensors") for folder in (one, two))
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4)
        if part == "whole":
            losses = steps(two)
            shutil.rmtree(two / "checkpoints" / "step-000004")
            (two / "model.safetensors").unlink()
            (two / "evaluation.json").write_text(json.dumps({"before": {}}))
    assert steps(two) == losses  # bit for bit


def test_two_launchers_are_one_run(tmp_path):
    """The config for several machines, on one: each starts one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["optim.max_steps=2", "every.log=1", "every.evaluate=1000"]
    run, started = tmp_path / "run", []
    for rank in (1, 0):
        launcher = ("--machine_rank", str(rank), "--main_process_port", port)
        started.append(launch("multi-node", run, *options, launcher=launcher))
    assert [process.wait(timeout=900) for process in started] == [0, 0], run.with_suffix(".log").read_text()[-3000:]
    one = tmp_path / "one"
    assert (
        train(load_config(engine_worker.CONFIG, [*options, f"run.output_dir={one}", "optim.micro_batch_size=4"])) == 0
    )
    assert steps(run) == pytest.approx(steps(one), rel=1e-5)
    assert json.loads((run / "provenance.json").read_text())["launches"][0]["processes"] == 2
