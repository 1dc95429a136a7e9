"""Metrics and samples: in files, in wandb (offline) and in TensorBoard, and whole after a resumption."""

import importlib.util
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import ROOT, TINY
from train import trackers
from train.command import load_config
from train.config import TrackingConfig, TrainConfig
from train.errors import ConfigError
from train.run_folder import claim
from train.trackers import check_trackers, wandb_mode
from train.tracking import Tracker, flatten, read_lines, truncate_after


def config_in(folder: Path, *overrides: str) -> TrainConfig:
    config = load_config(TINY, [f"run.output_dir={folder}", *overrides])
    claim(config, [])
    return config


def test_metrics_are_one_flushed_json_object_a_line(tmp_path):
    with Tracker(config_in(tmp_path), resumed_step=0) as tracker:
        tracker.log(1, "train", {"loss": 2.5, "exits": {"1": 3.0}})
        line = (tmp_path / "metrics.jsonl").read_text()  # there before the tracker is closed
    assert json.loads(line) == {"step": 1, "kind": "train", "loss": 2.5, "exits": {"1": 3.0}}


def test_resuming_drops_the_lines_of_steps_that_were_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)) + '{"step": 3, "lo')
    truncate_after(path, 4)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]


def test_samples_keep_every_character_and_go_on_after_a_resumption(tmp_path):
    strange = {"prompt": "a\u2028b\x85 é", "continuation": "c\r\nd\n"}  # line ends for some, and text here
    with Tracker(config_in(tmp_path), resumed_step=0) as tracker:
        for step in (0, 2, 4):
            tracker.log_samples(step, [strange])
            tracker.log(step, "validation", {"last": {"loss": 2.0 + step}})
    with Tracker(config_in(tmp_path), resumed_step=2) as tracker:
        assert [record["step"] for record in tracker.validations] == [0, 2]
        tracker.log_samples(3, [strange])
    assert read_lines(tmp_path / "samples.jsonl") == [{"step": step, **strange} for step in (0, 2, 3)]


def test_other_processes_write_nothing(tmp_path):
    config = config_in(tmp_path, "tracking.trackers=[wandb,tensorboard]")
    with Tracker(config, resumed_step=0, enabled=False) as tracker:
        tracker.log(1, "train", {"loss": 2.5})
        tracker.log_samples(1, [{"prompt": "a", "continuation": "b"}])
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "provenance.json"}


def test_nested_metrics_are_flat_for_trackers():
    assert flatten({"loss": 1, "exits": {"2": {"agreement": 0.5}}}, "test") == {
        "test/loss": 1,
        "test/exits/2/agreement": 0.5,
    }


# Which trackers


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"tracking.trackers has 'mlflow'; choose from wandb, tensorboard, trackio"):
        TrackingConfig(trackers=("mlflow",))


def test_a_tracker_that_is_not_installed_names_the_command(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has trackio, which is not installed: run `pip install trackio`"):
        check_trackers(TrackingConfig(trackers=("trackio",)))
    check_trackers(TrackingConfig())


def test_nothing_of_a_tracker_is_imported_unless_it_is_asked_for(tmp_path):
    program = (
        "import sys; from train.command import load_config; from train.tracking import Tracker\n"
        f"Tracker(load_config({str(TINY)!r} and __import__('pathlib').Path({str(TINY)!r}), "
        f"['run.output_dir={tmp_path}']), 0).close()\n"
        "print([name for name in ('wandb', 'tensorboard', 'trackio', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wandb_never_asks(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(TrackingConfig()) == "offline"
    with pytest.raises(ConfigError, match=r"tracking\.wandb_mode is online, but there is no API key"):
        check_trackers(TrackingConfig(trackers=("wandb",), wandb_mode="online"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode(TrackingConfig()) == "online"
    assert wandb_mode(TrackingConfig(wandb_mode="offline")) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode(TrackingConfig()) == "disabled"


# What is in them


def log_twice(folder: Path, *overrides: str) -> Tracker:
    """Two launches of one run: steps 1 and 2, then, step 2 lost, step 2 again and 3. Samples at steps 0 and 3."""
    config = config_in(folder, *overrides)
    with Tracker(config, resumed_step=0) as tracker:
        tracker.log_samples(0, [{"prompt": "def", "continuation": " f"}])
        for step in (1, 2):
            tracker.log(step, "train", {"loss": 10.0 + step, "exits": {"2": 3.0}})
    with Tracker(config, resumed_step=1) as tracker:
        for step in (2, 3):
            tracker.log(step, "train", {"loss": 20.0 + step, "exits": {"2": 3.0}})
        tracker.log_samples(3, [{"prompt": "def", "continuation": " g"}])
    return tracker


@pytest.mark.slow
def test_wandb_writes_offline_into_the_run_folder_one_run_for_all_launches(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    tracker = log_twice(tmp_path, "tracking.trackers=[wandb]", "tracking.wandb_mode=offline")
    run_id = json.loads((tmp_path / "provenance.json").read_text())["run_id"]
    launches = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert 1 <= len(launches) <= 2  # one folder, if both began in the same second
    assert tracker.notes == [f"wandb is offline; to send it later: wandb sync {tmp_path}/wandb/offline-run-*"]
    history, config = [], {}
    for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
        assert path.name == f"run-{run_id}.wandb"
        for record in records_of(path):
            items = record.history.item if record.HasField("history") else ()
            history.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            for item in record.run.config.update if record.HasField("run") else ():
                config[item.key] = json.loads(item.value_json)
    losses = {(row["step"], row["train/loss"]) for row in history if "train/loss" in row}
    assert losses == {(1, 11.0), (2, 12.0), (2, 22.0), (3, 23.0)}  # a step that is repeated is not dropped
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/*/files/media/table/*.json")]
    assert [[0, "def", " f"], [3, "def", " g"]] in [table["data"] for table in tables]
    assert config["recipe"]["exits"] == [1, 2]


def records_of(path: Path) -> list:
    """The records of a wandb file, which `wandb sync` would send; waits for wandb to have written the last one."""
    from wandb.proto import wandb_internal_pb2

    deadline, records = time.monotonic() + 60, []
    while not records or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, "wandb does not finish its file"
        data, place, records, parts = path.read_bytes(), 7, [], b""  # LevelDB's log format behind 7 bytes
        while place + 7 <= len(data):
            if (left := 32768 - place % 32768) < 7:  # no header of a record fits into the rest of a block
                place += left
                continue
            size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            parts += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # whole, or the last part
                records.append(wandb_internal_pb2.Record.FromString(parts))
                parts = b""
        time.sleep(0.05)
    return records


@pytest.mark.slow
def test_tensorboard_has_the_curves_and_forgets_the_lost_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = log_twice(tmp_path, "tracking.trackers=[tensorboard]")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 11.0), (2, 22.0), (3, 23.0)]
    assert {"train/exits/2"} <= set(events.Tags()["scalars"])
    samples = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")]
    assert " g" in samples[-1]
    assert "max_steps: 6" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert tracker.notes == [f"TensorBoard: tensorboard --logdir {tmp_path / 'tensorboard'}"]


@pytest.mark.slow
def test_trackio_has_the_run_of_both_launches(tmp_path, monkeypatch):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before it is imported
    log_twice(tmp_path / "run", "tracking.trackers=[trackio]", "tracking.project=layerskip-test")
    [database] = (tmp_path / "trackio").glob("layerskip-test*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_id, step, metrics from metrics order by id").fetchall()
    assert len({run_id for run_id, _, _ in rows}) == 1
    losses = [(step, json.loads(values).get("train/loss")) for _, step, values in rows]
    assert [pair for pair in losses if pair[1]] == [(1, 11.0), (2, 12.0), (2, 22.0), (3, 23.0)]
