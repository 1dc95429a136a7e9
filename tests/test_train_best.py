"""The best checkpoint: which one it is, that it survives pruning and resuming, and that it can be exported."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import TINY, assert_same_weights, documents, metrics
from train.best import best_record
from train.checkpoint import latest_checkpoint, whole_checkpoint
from train.command import load_config
from train.errors import ConfigError
from train.loop import train


def record(step: int, loss: float, *speedups: float) -> dict:
    exits = {
        str(i + 1): {"loss": 1.0, "forecast": {"greedy": {"speedup": speedup}}} for i, speedup in enumerate(speedups)
    }
    return {"step": step, "kind": "validation", "last": {"loss": loss}, "exits": exits}


def test_continual_the_fastest_within_the_margin_of_the_start():
    records = [record(0, 2.0, 3.0), record(1, 1.9, 1.2, 1.1), record(2, 2.01, 1.1, 1.4), record(3, 2.03, 1.9)]
    assert best_record(records, 0.01, from_scratch=False)["step"] == 2  # 2.03 is beyond 2.02; step 0 is no checkpoint
    assert best_record(records, 0.02, from_scratch=False)["step"] == 3
    assert best_record(records[:2], 0.0, from_scratch=False)["step"] == 1
    assert best_record([records[0], records[3]], 0.01, from_scratch=False) is None


def test_from_scratch_an_early_one_is_forgotten_when_a_better_last_layer_is_seen():
    """An untrained last layer is easy to agree with: its exits are fast, and it is worth nothing."""
    records = [
        record(0, 6.0, 3.0),
        record(1, 5.0, 2.5),
        record(2, 4.0, 1.2),
        record(3, 4.02, 1.3),
        record(4, 3.99, 1.1),
    ]
    steps = [best_record(records[: n + 1], 0.01, from_scratch=True) for n in range(5)]
    assert [found and found["step"] for found in steps] == [None, 1, 2, 3, 3]
    assert best_record(records, 0.001, from_scratch=True)["step"] == 4


def test_a_step_measured_again_counts_once_and_no_forecast_is_no_best():
    again = [record(1, 2.0, 1.5), record(2, 2.0, 1.4), record(1, 2.0, 1.1)]
    assert best_record(again, 0.01, from_scratch=True)["step"] == 2
    bare = {"step": 1, "last": {"loss": 2.0}, "exits": {"1": {"loss": 3.0}}}
    assert best_record([bare], 0.01, from_scratch=True) is None
    assert best_record([], 0.01, from_scratch=True) is None


def test_exporting_the_best_needs_it_to_be_kept():
    with pytest.raises(ConfigError, match=r"best\.export is true and best\.keep false"):
        load_config(TINY, ["best.export=true", "best.keep=false"])


@pytest.fixture
def run(tmp_path):
    """Train configs/tiny.yaml for four steps from scratch, each evaluated, with a margin that allows every checkpoint:
    then an early one is the best, since exits agree more with a last layer that knows nothing."""
    text = documents(tmp_path / "text.jsonl")

    def start(name: str, *overrides: str) -> Path:
        source = [*text, "optim.max_steps=4", "best.margin=9"]
        source += ["every.evaluate=1", "every.save=4", "every.keep=1", "optim.schedule=constant", "tracking.samples=0"]
        source += ["best.keep=true"]
        assert train(load_config(TINY, [*source, f"run.output_dir={tmp_path / name}", *overrides])) == 0
        return tmp_path / name

    return start


def validations(folder: Path) -> list[dict]:
    return metrics(folder, "validation")


@pytest.mark.slow
def test_the_best_survives_pruning_and_may_be_exported_later(run, capsys):
    folder = run("run")
    best = best_record(validations(folder), 9, from_scratch=True)["step"]
    assert best < 4
    steps = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert steps == [f"step-{best:06d}", "step-000004"]
    assert (whole_checkpoint(folder, best) / "optimizer.pt").is_file()
    assert latest_checkpoint(folder).name == "step-000004"
    assert_same_weights(folder, folder / "checkpoints" / "step-000004")
    assert f"best checkpoint: step {best}, forecast" in capsys.readouterr().out

    run("run", "best.export=true")  # the same command, and the finished run is only exported anew
    assert "it is exported" in capsys.readouterr().out
    assert_same_weights(folder, folder / "checkpoints" / f"step-{best:06d}")
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["exported"] == {"rule": "best", "step": best}
    assert record["steps"] == 4
    measured = next(line for line in validations(folder) if line["step"] == best)
    assert record["after"]["validation"]["last"]["loss"] == pytest.approx(measured["last"]["loss"], rel=1e-6)
    run("run", "best.export=true")
    assert "is finished already" in capsys.readouterr().out


@pytest.mark.slow
def test_keeping_the_best_does_not_disturb_the_run_nor_its_resumption(run):
    without = run("without", "best.keep=false")
    assert [path.name for path in (without / "checkpoints").iterdir()] == ["step-000004"]
    whole = run("whole")
    broken = run("broken", "optim.max_steps=2")
    run("broken")
    for folder in (whole, broken):
        assert_same_weights(without, folder)
    best = best_record(validations(broken), 9, from_scratch=True)["step"]
    assert whole_checkpoint(broken, best)
    assert [line["step"] for line in validations(broken)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_forecasts_before_and_after_a_resumption_go_by_the_same_costs(run):
    folder = run("run", "optim.max_steps=2")
    path = folder / "costs.json"
    costs = json.loads(path.read_text())
    costs["seconds"]["plain"] = 1000.0
    path.write_text(json.dumps(costs))
    run("run")
    last = validations(folder)[-1]["exits"]["1"]["forecast"]["greedy"]
    seconds = costs["seconds"]["draft"]["1"] + costs["seconds"]["verify"]["1"]["1"]
    assert last["speedup"] > 10 / seconds  # by the costs of the first launch, not by new ones
    costs["conditions"]["threads"] = 99  # another machine's
    path.write_text(json.dumps(costs))
    run("run", "optim.max_steps=5")
    assert json.loads(path.read_text())["seconds"]["plain"] < 1


@pytest.mark.slow
def test_a_best_checkpoint_that_is_gone_is_told(run, capsys):
    folder = run("run")
    best = best_record(validations(folder), 9, from_scratch=True)["step"]
    shutil.rmtree(folder / "checkpoints" / f"step-{best:06d}")
    run("run", "best.export=true")
    assert f"of step {best}, is gone or not whole: the last is exported" in capsys.readouterr().out
    assert_same_weights(folder, folder / "checkpoints" / "step-000004")
