"""A disk that is full while something other than a checkpoint is written: one line that says what and how to go on."""

import errno
import resource
from pathlib import Path

import numpy as np
import pytest

from layerskip.checkpoint import whole_files
from tests.runs import TINY, documents, metrics
from train import finish
from train.answers import Answers
from train.chat import Encoded
from train.checkpoint import latest_checkpoint
from train.command import load_config
from train.data import prepare_data
from train.disk import writing_alone
from train.errors import LocalError, TrainingError
from train.loop import train
from train.packing import write_tokens
from train.splits import Document

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Overrides for forty short documents."""
    return [*documents(tmp_path_factory.mktemp("text") / "text.jsonl"), "every.log=1", "every.evaluate=1000"]


def start(folder: Path, *overrides: str) -> int:
    return train(load_config(TINY, [f"run.output_dir={folder}", *overrides]))


def refuse(monkeypatch, *names: str) -> None:
    """Have the disk take no file of these names that is written aside."""
    replace = whole_files.os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name in names:
            raise FULL
        replace(source, target)

    monkeypatch.setattr(whole_files.os, "replace", full)


def refused(caught: pytest.ExceptionInfo, path: Path) -> None:
    """The error is one line that names the file, and what to do."""
    message = str(caught.value)
    assert message.startswith(f"cannot write {path} (")
    assert "No space left on device" in message
    assert " GB are free there)" in message
    assert "make room, and the same command goes on" in message
    assert "\n" not in message


def test_metrics_that_cannot_be_written_stop_the_run_with_a_checkpoint(tmp_path, text, capsys):
    options = [*text, "optim.schedule=constant", "every.save=100"]
    run = tmp_path / "run"
    assert start(run, *options, "optim.max_steps=3") == 0
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(LocalError) as caught:
        start(run, *options, "optim.max_steps=9")
    refused(caught, run / "metrics.jsonl")
    assert latest_checkpoint(run).name == "step-000005"  # step 4 could not be logged; the one in hand was finished
    assert "stopped after step 5; the same command goes on from there" in capsys.readouterr().out
    (run / "metrics.jsonl").unlink()
    assert start(run, *options, "optim.max_steps=9") == 0
    assert [record["step"] for record in metrics(run)] == [6, 7, 8, 9]


def test_another_error_is_not_hidden_by_metrics_that_cannot_be_written(tmp_path, text, monkeypatch):
    run = tmp_path / "run"
    assert start(run, *text, "optim.max_steps=3") == 0
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")

    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr("train.checkpoint.flush", full)
    with pytest.raises(TrainingError, match=r"cannot write .*step-000005\.partial .*checkpoints before it are whole"):
        start(run, *text, "optim.max_steps=9")
    assert latest_checkpoint(run).name == "step-000003"


@pytest.mark.parametrize("block", [None, 32])
def test_token_files_that_cannot_be_written_are_told(tmp_path, block):
    (tmp_path / "train.bin").symlink_to("/dev/full")
    encoded = [(Document("", "", ""), Encoded([1] * 20, [True] * 20)) for _ in range(9)]
    with pytest.raises(LocalError) as caught:
        write_tokens(encoded, np.dtype(np.uint16), tmp_path, block)
    refused(caught, tmp_path / "train.bin")


@pytest.mark.parametrize("name", ["data/manifest.json", "prompts/test.jsonl"])
def test_what_is_beside_the_tokens_is_told_too(tmp_path, text, monkeypatch, name):
    refuse(monkeypatch, Path(name).name)
    config = load_config(TINY, [f"run.output_dir={tmp_path}", *text])
    with pytest.raises(LocalError) as caught:
        prepare_data(config)
    refused(caught, tmp_path / name)


def test_a_tokenizer_that_cannot_be_written_is_told(tmp_path):
    """tokenizers says it by an error of no kind, which other errors of that kind must not be taken for."""
    path = tmp_path / "tokenizer"
    told = r"cannot write .*tokenizer \(File too large \(os error 27\); "
    with pytest.raises(LocalError, match=told), writing_alone(path):
        raise Exception("File too large (os error 27)")
    with pytest.raises(Exception, match=r"^something else$"), writing_alone(path):
        raise Exception("something else")


def test_answers_that_cannot_be_written_are_told(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(LocalError, match=r"cannot write .*a\.jsonl\.partial \(.*File too large; "):
            answer(tmp_path / "a.jsonl", "a" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def answer(path: Path, said: str) -> None:
    with Answers(path, {}) as answers:
        answers.add(0, {"text": said})


OPTIONS = ["optim.max_steps=2", "optim.warmup_steps=0", "data.own_text=1", "data.own_text_rows=2"]


@pytest.mark.parametrize("name", ["costs.json", "own-000000.bin", "evaluation.json"])
def test_what_a_run_writes_between_its_checkpoints_is_told(tmp_path, text, monkeypatch, name):
    path = tmp_path / "data" / name if name.startswith("own") else tmp_path / name
    refuse(monkeypatch, name)
    with pytest.raises(TrainingError) as caught:
        start(tmp_path, *text, *OPTIONS)
    refused(caught, path)


def test_a_finished_checkpoint_that_cannot_be_put_in_place_is_told_and_tried_again(tmp_path, text, monkeypatch):
    replace = finish.os.replace

    def full(source: Path, target: Path) -> None:
        if "finished.partial" in str(source):
            raise FULL
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(finish.os, "replace", full)
        with pytest.raises(TrainingError) as caught:
            start(tmp_path, *text, *OPTIONS)
    refused(caught, tmp_path / "finished.partial")
    assert not (tmp_path / "finished.partial").exists()
    assert start(tmp_path, *text, *OPTIONS) == 0
    assert (tmp_path / "config.json").is_file()


def test_a_run_whose_card_could_not_be_written_is_finished_by_the_same_command(tmp_path, text, monkeypatch, capsys):
    card, longer = tmp_path / "README.md", ["optim.schedule=constant", "optim.max_steps=3"]
    assert start(tmp_path, *text, *OPTIONS, "optim.schedule=constant") == 0
    before = card.read_text()
    assert "| optimizer steps | 2 |" in before
    for _ in range(2):
        with monkeypatch.context() as patch:
            refuse(patch, "README.md")
            with pytest.raises(TrainingError) as caught:
                start(tmp_path, *text, *OPTIONS, *longer)
        refused(caught, card)
        assert card.read_text() == before  # whole, if of an earlier end
    assert start(tmp_path, *text, *OPTIONS, *longer) == 0
    assert "| optimizer steps | 3 |" in card.read_text()
    capsys.readouterr()
    assert start(tmp_path, *text, *OPTIONS, *longer) == 0
    assert "is finished already" in capsys.readouterr().out
