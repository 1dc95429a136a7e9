"""`push`, as a program, against the Hub's protocol on loopback; what it uploads is downloaded and decodes the same."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import layerskip
from infer.command import main
from layerskip.checkpoint.settings import carry, store_setting
from layerskip.model.adapters import adapters_of
from tests import tiny
from tests.hub_server import WRITER, Hub, running_hub

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def loopback():
    with running_hub() as server:
        yield server


def environment(server: Hub, folder: Path, token: str | None = WRITER) -> dict[str, str]:
    """HF_ENDPOINT and its like are read when huggingface_hub is imported: hence programs of their own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore"}
    return {**inherited, **settings, **({"HF_TOKEN": token} if token else {})}


def start(server: Hub, run_dir: Path, *argv: str, token: str | None = WRITER) -> subprocess.Popen:
    command = [sys.executable, "-m", "infer", "push", str(run_dir), *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(server, run_dir.parent, token), **pipes)


def push(server: Hub, run_dir: Path, *argv: str, token: str | None = WRITER) -> tuple[int, str, str]:
    process = start(server, run_dir, *argv, token=token)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def shards(folder: Path, sizes: dict[str, int]) -> dict[str, str]:
    """Replaces the weights by shards of noise; returns the sha256 of each."""
    (folder / "model.safetensors").unlink()
    weights = {str(index): name for index, name in enumerate(sizes)}
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weights}}}'.replace("'", '"'))
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sizes}


def test_an_upload_that_was_killed_goes_on_with_what_is_missing(tiny_checkpoint, loopback):
    """Two shards; the program is killed when one has arrived and half of the other. The second run sends the other."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    oids = shards(tiny_checkpoint, {first: 100_000, second: 3_000_000})
    loopback.faults[oids[second]] = ("hold", 1)
    process = start(loopback, tiny_checkpoint, "--repo", "someone/it")
    assert loopback.broken.wait(60)
    deadline = time.monotonic() + 60
    while oids[first] not in loopback.objects and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert loopback.files("someone/it") == {}  # never half a model
    assert loopback.counts()["object"] == 2

    code, out, err = push(loopback, tiny_checkpoint, "--repo", "someone/it")
    assert (code, out) == (0, f"uploaded to {loopback.url}/someone/it\n"), err
    assert (loopback.counts()["object"], loopback.counts()["commit"]) == (3, 1)
    assert [path for method, path in loopback.requests if method == "PUT"][2] == f"/lfs/{oids[second]}"
    there = loopback.files("someone/it")
    assert all(there[name] == (tiny_checkpoint / name).read_bytes() for name in oids)


def test_flags_arrive(tiny_checkpoint, loopback):
    (tiny_checkpoint / "prompts").mkdir()
    (tiny_checkpoint / "prompts" / "test.jsonl").write_text("{}")
    flags = ("--private", "--revision", "trial", "--license", "mit", "--base-model", "some/base")
    code, out, err = push(loopback, tiny_checkpoint, "--repo", "someone/it", *flags, "--exclude", "prompts/*")
    assert (code, out) == (0, f"uploaded to {loopback.url}/someone/it/tree/trial\n"), err
    assert loopback.repositories["someone/it"].private
    assert loopback.files("someone/it") == {}
    there = loopback.files("someone/it", "trial")
    assert "model.safetensors" in there
    assert "prompts/test.jsonl" not in there
    card = there["README.md"].decode()
    assert "\nlicense: mit\n" in card
    assert "\nbase_model: some/base\n" in card


@pytest.mark.parametrize(
    ("token", "repo", "said"),
    [
        (None, "someone/it", "no Hugging Face token: run `hf auth login`"),
        ("hf_revoked", "someone/it", "the Hub does not accept the token (401"),
        ("hf_reader", "someone/it", "the token may not write to someone/it (403"),
    ],
)
def test_without_rights_it_ends_with_one_line(tiny_checkpoint, loopback, token, repo, said):
    code, out, err = push(loopback, tiny_checkpoint, "--repo", repo, token=token)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err
    assert loopback.repositories == {}


_DOWNLOAD = """
import json, sys, torch, layerskip
from transformers import AutoModelForCausalLM, AutoTokenizer
from layerskip.model.adapters import adapters_of

torch.set_num_threads(1)
for revision in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], revision=revision)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], revision=revision).eval()
    inputs = tokenizer("def value(index)", return_tensors="pt", return_token_type_ids=False)
    settings = {"max_new_tokens": 24, "do_sample": False}
    outputs = [model.generate(**inputs, **settings)[0], layerskip.generate(model, **inputs, **settings)[0]]
    total = sum(weight.sum().item() for weight in adapters_of(model).parameters())
    print(json.dumps([[tokenizer.decode(output) for output in outputs], total]))
"""


def with_adapters(folder: Path, tokenizer, seed: int, loss: float) -> tuple[str, float]:
    """Saves a model with adapters of noise and a tuned setting; its continuation and the sum of its adapters."""
    model = tiny.llama(vocab_size=len(tokenizer))
    layerskip.prepare(model, layerskip.Recipe.preset("frozen-target", exits=(2,), adapter_rank=4, seed=seed))
    adapters = adapters_of(model)
    torch.manual_seed(seed)
    for weight in adapters.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    store_setting(model, layerskip.Setting(2, 3))
    carry(model.config, exits={"2": {"loss": loss}})
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    inputs = tokenizer("def value(index)", return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    return tokenizer.decode(output), sum(weight.sum().item() for weight in adapters.parameters())


@pytest.mark.slow
def test_what_was_uploaded_is_downloaded_and_says_the_same(loopback, tmp_path, tokenizer):
    """Two branches of a private repository with other adapters each: from_pretrained brings each branch its own."""
    expected = {}
    for seed, branch in enumerate(("main", "trial")):
        folder = tmp_path / branch
        expected[branch] = with_adapters(folder, tokenizer, seed, loss=2.0 + seed)
        code, _, err = push(loopback, folder, "--repo", "someone/it", "--private", "--revision", branch)
        assert code == 0, err
    command = [sys.executable, "-c", _DOWNLOAD, "someone/it", *expected]
    settings = {**environment(loopback, tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for line, (text, total) in zip(result.stdout.splitlines(), expected.values(), strict=True):
        assert json.loads(line) == [[text, text], pytest.approx(total, abs=1e-4)]
    assert expected["main"][1] != pytest.approx(expected["trial"][1], abs=1e-2)


def dry(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["push", *argv, "--dry-run"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dry_run_lists_what_would_go_and_writes_nothing(tiny_checkpoint, capsys):
    for name in ("checkpoints/step-000010/optimizer.pt", "optimizer.pt", "wandb/a.log", "prompts/test.jsonl"):
        (tiny_checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (tiny_checkpoint / name).write_text("secret")
    before = sorted(tiny_checkpoint.rglob("*"))
    code, out, err = dry(capsys, str(tiny_checkpoint), "--repo", "me/it", "--exclude", "prompts/*")
    assert code == 0
    for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json"):
        assert name in out
    size = (tiny_checkpoint / "model.safetensors").stat().st_size
    assert f"{size:,}" in out
    for name in ("optimizer", "checkpoints", "wandb", "prompts"):
        assert name not in out
    assert "names no licence: give --license" in err
    assert sorted(tiny_checkpoint.rglob("*")) == before
    assert dry(capsys, str(tiny_checkpoint), "--repo", "me/it", "--license", "mit")[2] == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{model}", "--repo", "it"], "'it' names no repository: write owner/name"),
        (["{model}", "--repo", "me/it", "--revision", "a b"], "'a b' cannot name a branch"),
        (["{model}", "--repo", "me/it", "--base-model", "gpt2"], "'gpt2' names no repository"),
        (["{model}/nowhere", "--repo", "me/it"], "is no folder"),
        (["{model}/..", "--repo", "me/it"], "holds no config.json"),
    ],
)
def test_errors(argv, said, tiny_checkpoint, capsys):
    code, out, err = dry(capsys, *(part.format(model=tiny_checkpoint) for part in argv))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_card_that_is_ones_own_goes_as_it_is_and_that_is_said(tiny_checkpoint, capsys):
    (tiny_checkpoint / "README.md").write_text("# Mine\n")
    code, out, err = dry(capsys, str(tiny_checkpoint), "--repo", "me/it", "--license", "mit")
    assert code == 0
    assert re.search(r"README\.md\W+7\W", out)
    assert err.startswith("README.md is your own")
    assert dry(capsys, str(tiny_checkpoint), "--repo", "me/it")[2] == ""


def test_a_folder_without_weights_is_refused(tiny_checkpoint, capsys):
    (tiny_checkpoint / "model.safetensors").unlink()
    code, _, err = dry(capsys, str(tiny_checkpoint), "--repo", "me/it")
    assert code == 2
    assert "holds no model.safetensors" in err
