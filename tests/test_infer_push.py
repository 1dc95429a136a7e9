"""`push`: the dry run shows what would go and touches nothing; errors are one line."""

import pytest

from infer.command import main
from layerskip import hub


def push(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["push", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dry_run_lists_what_would_go_and_writes_nothing(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(hub, "get_token", lambda: pytest.fail("a dry run needs no token"))
    for name in ("checkpoints/step-000010/optimizer.pt", "optimizer.pt", "wandb/a.log", "config.yaml"):
        (tiny_checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (tiny_checkpoint / name).write_text("secret")
    before = sorted(tiny_checkpoint.rglob("*"))
    code, out, _ = push(capsys, str(tiny_checkpoint), "--repo", "me/it", "--dry-run")
    assert code == 0
    for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json"):
        assert name in out
    size = (tiny_checkpoint / "model.safetensors").stat().st_size
    assert f"{size:,}" in out
    for name in ("optimizer", "checkpoints", "wandb", "config.yaml"):
        assert name not in out
    assert sorted(tiny_checkpoint.rglob("*")) == before


def test_flags_reach_the_library(tiny_checkpoint, capsys, monkeypatch):
    calls = []

    def upload(*arguments, **named):
        calls.append((arguments, named))
        return "https://hub.test/me/it"

    monkeypatch.setattr(hub, "upload", upload)
    flags = ("--repo", "me/it", "--private", "--revision", "trial", "--license", "mit")
    assert push(capsys, str(tiny_checkpoint), *flags) == (0, "uploaded to https://hub.test/me/it\n", "")
    assert calls == [((tiny_checkpoint, "me/it"), {"private": True, "revision": "trial", "license": "mit"})]
    push(capsys, str(tiny_checkpoint), "--repo", "me/it")
    assert calls[1][1] == {"private": None, "revision": None, "license": None}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{model}", "--repo", "it"], "'it' names no repository: write owner/name"),
        (["{model}/nowhere", "--repo", "me/it"], "is no folder"),
        (["{model}/..", "--repo", "me/it", "--dry-run"], "holds no config.json"),
        (["{model}", "--repo", "me/it"], "no Hugging Face token"),
    ],
)
def test_errors(argv, said, tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    code, out, err = push(capsys, *(part.format(model=tiny_checkpoint) for part in argv))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_folder_without_weights_is_refused(tiny_checkpoint, capsys):
    (tiny_checkpoint / "model.safetensors").unlink()
    code, _, err = push(capsys, str(tiny_checkpoint), "--repo", "me/it", "--dry-run")
    assert code == 2
    assert "holds no model.safetensors" in err
