"""Uploads beside a run: what arrives, and that nothing which goes wrong there reaches the training."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from tests.hub_server import WRITER, running_hub
from train.command import load_config
from train.console import Reporter
from train.errors import ConfigError
from train.hub import Uploads

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.yaml"
RECORD = {"step": 7, "last": {"loss": 2.0}, "exits": {"1": {"loss": 3.0, "agreement": 0.5, "overlap": 0.25}}}


@pytest.fixture
def loopback(monkeypatch, tmp_path):
    """The Hub on loopback, for the uploads' own processes by the environment."""
    with running_hub() as server:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this process read it long ago
        settings = {"HF_ENDPOINT": server.url, "HF_TOKEN": WRITER, "HF_HOME": str(tmp_path / "hf")}
        for name, value in {**settings, "HF_HUB_DISABLE_XET": "1", "PYTHONWARNINGS": "ignore"}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    """A checkpoint of step 7, in a run folder."""
    folder = tmp_path / "run" / "checkpoints" / "step-000007"
    shutil.copytree(tiny_checkpoint, folder)
    for name in ("optimizer.pt", "state.json"):
        (folder / name).write_bytes(b"moments")
    return folder


def uploads(tmp_path: Path, *overrides: str, main: bool = True) -> Uploads:
    settings = ["hub.repo=someone/it", "best.keep=true", f"run.output_dir={tmp_path / 'run'}", *overrides]
    return Uploads(load_config(CONFIG, settings), Reporter(True), main, waits=(0.05,))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def settle(running: Uploads) -> None:
    """Polls, as the loop does, until nothing is under way."""
    until = time.monotonic() + 60
    while running._process is not None and time.monotonic() < until:
        running.poll()
        time.sleep(0.02)
    assert running._process is None


def test_the_newest_best_checkpoint_goes_even_if_it_is_pruned_meanwhile(tmp_path, checkpoint, loopback, capsys):
    """Three bests in a row: the first goes, the second is overtaken, the third goes, from files that are gone."""
    weights = (checkpoint / "model.safetensors").read_bytes()
    with uploads(tmp_path, "hub.when=best", "hub.license=mit") as running:
        loopback.faults[sha256(checkpoint / "model.safetensors")] = ("hold", 1)
        running.best(checkpoint, RECORD, 700)
        first = running._process
        for step in (8, 9):
            later = checkpoint.with_name(f"step-00000{step}")
            shutil.copytree(checkpoint, later)
            (later / "model.safetensors").write_bytes(weights + bytes([step]))
            running.best(later, {**RECORD, "step": step}, 100 * step)
            shutil.rmtree(later)
        assert running._process is first  # nothing was waited for: it is held
        assert loopback.broken.wait(60)
        running._process.kill()
        settle(running)
        assert loopback.files("someone/it")["model.safetensors"] == weights + bytes([9])
        running.finished()
    there = loopback.files("someone/it")
    assert {"optimizer.pt", "state.json"} & set(there) == set()
    card = ModelCard(there["README.md"].decode())
    assert "checkpoint of step 9 of a run that is still going on" in card.text
    assert "| 1 | 3 | 0.5 | 0.25 |" in card.text
    assert (card.data.license, card.data.eval_results[0].dataset_split) == ("mit", "validation")
    assert loopback.repositories["someone/it"].private
    out = capsys.readouterr().out
    assert "warning: the best checkpoint so far (step-000007) was not uploaded: its process ended with code -9" in out
    assert f"uploaded the best checkpoint so far (step-000009) to {loopback.url}/someone/it" in out
    running.wait()
    assert not (tmp_path / "run" / "uploads.partial").exists()


def test_the_wait_at_the_end_has_a_limit(tmp_path, checkpoint, loopback, capsys):
    for path in checkpoint.iterdir():
        shutil.move(path, tmp_path / "run" / path.name)
    loopback.faults[sha256(tmp_path / "run" / "model.safetensors")] = ("hold", 1)
    with uploads(tmp_path, "hub.timeout=3", "hub.revision=trial") as running:
        running.finished()
    process = running._process
    assert loopback.broken.wait(60)
    running.wait()
    assert process.returncode == -9
    out = capsys.readouterr().out
    assert "waiting for the upload to someone/it, 3 s at most" in out
    again = f"python -m infer push {tmp_path / 'run'} --repo someone/it --private --revision trial"
    assert f"warning: the finished run was not uploaded: not done after 3 s (hub.timeout); {again}" in out


def test_a_run_that_stops_takes_its_upload_with_it(tmp_path, checkpoint, loopback):
    loopback.faults[sha256(checkpoint / "model.safetensors")] = ("hold", 1)
    with uploads(tmp_path, "hub.when=best") as running:
        running.best(checkpoint, RECORD, 700)
        process = running._process
        assert loopback.broken.wait(60)
    assert process.returncode == -9
    assert not (tmp_path / "run" / "uploads.partial").exists()


def test_what_fails_is_told_and_nothing_else_happens(tmp_path, checkpoint, loopback, monkeypatch, capsys):
    with uploads(tmp_path, "hub.when=best") as running:
        monkeypatch.setenv("HF_TOKEN", "hf_reader")
        running.best(checkpoint, RECORD, 700)
        settle(running)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        running.best(checkpoint, RECORD, 700)
        settle(running)
        running.best(checkpoint.with_name("pruned"), RECORD, 700)
        running.finished()
    running.wait()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert ["may not write to someone/it (403" in lines[0], "cannot reach http://127.0.0.1:9" in lines[1]] == [True] * 2
    assert "warning: the best checkpoint is not uploaded: " in lines[2]
    assert "warning: the finished run was not uploaded: " in lines[3]
    assert len(lines) == 4
    assert loopback.repositories == {}


@pytest.mark.parametrize(
    "silent", [("hub.repo=null", True, "best"), ("hub.repo=someone/it", False, "best"), ("hub.when=end", True, "end")]
)
def test_nothing_goes_that_was_not_asked_for(tmp_path, checkpoint, loopback, silent):
    override, main, when = silent
    with uploads(tmp_path, f"hub.when={when}", override, main=main) as running:
        running.best(checkpoint, RECORD, 700)
        assert running._process is None
        if when != "end":
            running.finished()
    running.wait()
    assert loopback.requests == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hub.repo=own er/name"], "hub.repo: 'own er/name' names no repository"),
        (["hub.repo=a/b", "hub.revision=refs/pr/1"], "hub.revision: 'refs/pr/1' cannot name a branch"),
        (["hub.repo=a/b", "hub.when=best", "best.keep=false"], "hub.when is best and best.keep is false"),
        (["hub.when=sometimes"], "hub.when"),
        (["hub.timeout=0"], "hub.timeout"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(overrides, said):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_whole_run_uploads_its_best_and_then_itself(train_tiny, loopback, capsys):
    """In the loop: the best checkpoint by the way, the finished run at the end, with its card and without its paths."""
    folder = train_tiny(
        *("hub.repo=someone/it", "hub.when=best", "hub.license=apache-2.0", "optim.max_steps=6"),
        *("every.evaluate=2", "every.log=1", "best.keep=true", "best.margin=10"),
    )
    out = capsys.readouterr().out
    assert f"uploaded the finished run to {loopback.url}/someone/it" in out
    assert "warning" not in out
    there = loopback.files("someone/it")
    assert there["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert json.loads(there["evaluation.json"]) == json.loads((folder / "evaluation.json").read_text())
    card = ModelCard(there["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert 'from_pretrained("someone/it")' in card.text
    assert "still going on" not in card.text
    local = (str(folder), os.getcwd())
    assert [path for path in local for content in there.values() if path.encode() in content] == []
    assert loopback.counts()["commit"] >= 2  # a best one, and the finished run
    assert not (folder / "uploads.partial").exists()
