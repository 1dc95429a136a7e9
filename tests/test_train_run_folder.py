"""Whose a run folder is, what is written into it, and the lines of metrics that survive a resume."""

import dataclasses
import json
from pathlib import Path

import pytest

from train.command import load_config
from train.config import TrainConfig, WandbConfig
from train.errors import ConfigError, TrainingError
from train.run_folder import claim
from train.tracking import Tracker, flatten, truncate_after, wandb_mode

TINY = Path(__file__).resolve().parents[1] / "configs" / "tiny.yaml"


def config_in(folder: Path, *overrides: str) -> TrainConfig:
    return load_config(TINY, [f"run.output_dir={folder}", *overrides])


def test_claim_writes_how_the_run_was_started(tmp_path):
    config = config_in(tmp_path / "run")
    claim(config, ["tiny.yaml", "optim.max_steps=3"])
    claim(config, ["tiny.yaml"])  # a resumption
    assert load_config(tmp_path / "run" / "config.yaml") == config
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert [launch["argv"] for launch in record["launches"]] == [
        ["tiny.yaml", "optim.max_steps=3"],
        ["tiny.yaml"],
    ]
    assert {"torch", "transformers", "accelerate"} <= record["launches"][0]["versions"].keys()
    assert len(record["run_id"]) == 8


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("optim.learning_rate=1e-3", "optim.learning_rate is 0.002 there and 0.001 here"),
        ("run.seed=1", "run.seed is 0 there and 1 here"),
        ("recipe.exits=[1]", r"recipe.exits is \[1, 2\] there and \[1\] here"),
        ("data.sequence_length=32", "data.sequence_length is 64 there and 32 here"),
    ],
)
def test_another_runs_folder_is_refused_with_the_difference(tmp_path, override, difference):
    claim(config_in(tmp_path), [])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(TrainingError, match=difference + "; choose another run.output_dir, or run.overwrite=true"):
        claim(config_in(tmp_path, override), [])


def test_a_start_that_failed_before_its_first_step_does_not_block_the_corrected_one(tmp_path):
    claim(config_in(tmp_path, "data.sequence_length=512"), [])
    (tmp_path / "data").mkdir()
    corrected = config_in(tmp_path)
    claim(corrected, [])
    assert load_config(tmp_path / "config.yaml") == corrected
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "override",
    ["optim.max_steps=60", "optim.micro_batch_size=1", "every.log=1", "run.name=x", "hub.repo_id=a/b"],
)
def test_what_does_not_make_another_run_may_change(tmp_path, override):
    claim(config_in(tmp_path), [])
    claim(config_in(tmp_path, override), [])


def test_resume_never_refuses_any_run(tmp_path):
    claim(config_in(tmp_path), [])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(TrainingError, match=r"holds a run already, and run\.resume=never"):
        claim(config_in(tmp_path, "run.resume=never"), [])


def test_overwrite_deletes_what_a_run_writes_and_nothing_else(tmp_path):
    claim(config_in(tmp_path), [])
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "model.safetensors").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    claim(config_in(tmp_path, "run.seed=1", "run.overwrite=true"), [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.txt", "provenance.json"]


def test_overwrite_does_not_throw_away_the_same_run(tmp_path):
    claim(config_in(tmp_path, "run.overwrite=true"), [])
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    claim(config_in(tmp_path, "run.overwrite=true"), [])  # the same command again, after a crash
    assert (tmp_path / "checkpoints" / "step-000001").is_dir()


def test_a_checkpoint_that_no_run_wrote_is_not_written_over(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"holds config.json, but no run of this program"):
        claim(config_in(tmp_path), [])


def test_a_folder_with_other_files_may_be_used(tmp_path):
    (tmp_path / "slurm.log").write_text("")
    claim(config_in(tmp_path), [])


# Metrics


def test_metrics_are_one_flushed_json_object_a_line(tmp_path):
    with Tracker(config_in(tmp_path), resumed_step=0) as tracker:
        tracker.log(1, "train", {"loss": 2.5, "exits": {"1": 3.0}})
        line = (tmp_path / "metrics.jsonl").read_text()  # there before the tracker is closed
    assert json.loads(line) == {"step": 1, "kind": "train", "loss": 2.5, "exits": {"1": 3.0}}


def test_resuming_drops_the_lines_of_steps_that_were_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)) + '{"step": 3, "lo')
    truncate_after(path, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_other_processes_write_nothing(tmp_path):
    with Tracker(config_in(tmp_path), resumed_step=0, enabled=False) as tracker:
        tracker.log(1, "train", {"loss": 2.5})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_nested_metrics_are_flat_for_wandb():
    assert flatten({"loss": 1, "exits": {"2": {"agreement": 0.5}}}, "test") == {
        "test/loss": 1,
        "test/exits/2/agreement": 0.5,
    }


def test_wandb_never_asks(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(WandbConfig(project="p")) == "offline"
    with pytest.raises(ConfigError, match=r"wandb\.mode is online, but there is no API key"):
        wandb_mode(WandbConfig(project="p", mode="online"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode(WandbConfig(project="p")) == "online"
    assert wandb_mode(WandbConfig(project="p", mode="offline")) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(WandbConfig(project="p")) == "disabled"


def test_wandb_writes_offline_into_the_run_folder(tmp_path):
    config = config_in(tmp_path, "wandb.project=layerskip", "wandb.mode=offline")
    claim(config, [])
    with Tracker(config, resumed_step=0) as tracker:
        tracker.log(1, "train", {"loss": 2.5})
    run_id = json.loads((tmp_path / "provenance.json").read_text())["run_id"]
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))


def test_settings_are_recorded_whole(tmp_path):
    config = config_in(tmp_path)
    claim(config, [])
    assert dataclasses.asdict(load_config(tmp_path / "config.yaml")) == dataclasses.asdict(config)
