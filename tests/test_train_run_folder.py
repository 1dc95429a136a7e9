"""Whose a run folder is, and what is written into it."""

import dataclasses
import errno
import hashlib
import json
from pathlib import Path

import pytest

from tests.runs import TINY
from train.command import load_config
from train.config import TrainConfig
from train.errors import TrainingError
from train.run_folder import claim, record_data


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
    assert [launch["seed"] for launch in record["launches"]] == [0, 0]
    assert len(record["run_id"]) == 8


def test_the_data_a_run_reads_is_known_by_its_hash(tmp_path):
    claim(config_in(tmp_path), [])
    for name, content in (
        ("data/train.bin", b"tokens"),
        ("data/own-000004.bin", b"written later"),
        ("tokenizer/tokenizer.json", b"{}"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    record_data(tmp_path)
    noted = json.loads((tmp_path / "provenance.json").read_text())
    assert noted["data"] == {
        "data/train.bin": f"sha256:{hashlib.sha256(b'tokens').hexdigest()}",
        "tokenizer/tokenizer.json": f"sha256:{hashlib.sha256(b'{}').hexdigest()}",
    }
    (tmp_path / "data/train.bin").write_bytes(b"other")
    record_data(tmp_path)  # a resumption: what it began with stays
    assert json.loads((tmp_path / "provenance.json").read_text()) == noted


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("in its place")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            TrainingError, match=r"cannot write the run folder .*; make room, or choose another run\.output_dir"
        ):
            claim(config_in(place), [])


def test_a_full_disk_leaves_the_settings_of_the_run_whole(tmp_path, monkeypatch):
    """Else the run could never be told from another one again."""
    config = config_in(tmp_path)
    claim(config, [])
    before = (tmp_path / "config.yaml").read_bytes()

    def cut(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut)
        with pytest.raises(TrainingError, match=r"cannot write the run folder .*No space left on device"):
            claim(config_in(tmp_path, "optim.max_steps=60"), [])
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "provenance.json"}


def test_settings_that_are_there_already_are_not_written_again(tmp_path):
    claim(config_in(tmp_path), [])
    before = (tmp_path / "config.yaml").stat()
    claim(config_in(tmp_path), [])
    after = (tmp_path / "config.yaml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    claim(config_in(tmp_path, "optim.max_steps=60"), [])
    assert load_config(tmp_path / "config.yaml").optim.max_steps == 60


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
    ["optim.max_steps=60", "optim.micro_batch_size=1", "every.log=1", "run.name=x", "hub.repo=a/b"],
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


def test_settings_are_recorded_whole(tmp_path):
    config = config_in(tmp_path)
    claim(config, [])
    assert dataclasses.asdict(load_config(tmp_path / "config.yaml")) == dataclasses.asdict(config)
