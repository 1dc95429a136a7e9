"""The model card says what the run's files say; an upload sends what it should and nothing else."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, constants
from huggingface_hub.utils import close_session
from safetensors.torch import save_file

from layerskip.checkpoint.vocabulary import DRAFT_VOCABULARY_FILE
from layerskip.custom_generate import REQUIREMENTS
from layerskip.model.adapters import ADAPTERS_FILE
from layerskip.share import card, hub
from layerskip.share.run_record import read_run
from layerskip.share.scrub import find_secret, scrub
from layerskip.share.shared_files import shared_files, stage
from layerskip.training.recipe import Recipe
from tests.hub_server import WRITER, Hub, running_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # huggingface_hub's own upload
PUBLISHED = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    *("tokenizer_config.json", "evaluation.json", "metrics.jsonl", "prompts/test.jsonl", "prompts/validation.jsonl"),
    *("config.yaml", "provenance.json", "report.html", "tune.png", "plots/speed.svg"),
    *("custom_generate/generate.py", "custom_generate/requirements.txt"),
}
KEPT = {
    *("checkpoints/step-000010/model.safetensors", ".env", "notes.txt", "costs.json", "samples.jsonl"),
    *("checkpoints/step-000010/config.json", "checkpoints/step-000010/optimizer.pt", "optimizer.pt"),
    *("data/train.bin", "wandb/run-1/output.log", "tokenizer/tokenizer.json", "wandb/config.json", "lora.safetensors"),
    *("custom_generate/__pycache__/generate.pyc", "model.pt"),
}
PRIVATE = "/data/private corpus/of mine.jsonl"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "quickstart"
    for name in (PUBLISHED | KEPT) - {"README.md"}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    exits = {e: {"loss": 4.0 + int(e), "agreement": 0.25, "overlap": 0.5} for e in ("2", "10")}
    recipe = Recipe(exits=(2, 10), total_steps=20).to_dict()
    write(folder, "config", {"num_hidden_layers": 16, "layerskip": {"recipe": recipe, "exits": exits}})
    write(folder, "generation_config", {"layerskip": {"exit_layer": 2, "num_draft_tokens": 5}})
    split = {"last": {"loss": 3.5}, "exits": exits}
    setting = {"exit_layer": 2, "num_draft_tokens": 5, "chosen_on": "validation"}
    untrained = {"2": {"loss": 7.0, "agreement": 0.125, "overlap": 0.0}}
    evaluation = {
        "before": {"test": {"last": {"loss": 3.25}, "exits": untrained}, "validation": split},
        "after": {"test": split, "validation": split},
        "setting": {**setting, "forecast": {"mean_acceptance_length": 2.5, "speedup": 1.5, "interval": [1.4, 1.625]}},
        "steps": 20,
        "tokens": 123456,
        "forecast_conditions": {"device": "a processor", "threads": 2, "dtype": "bfloat16", "batch_size": 1},
    }
    write(folder, "evaluation", evaluation)
    (folder / "config.yaml").write_text(
        f"run:\n  output_dir: {folder}\nmodel:\n  name_or_path: someone/small-model\n  architecture: {{}}\n"
        f"data:\n  path:\n  - {PRIVATE}\n  dataset: someone/text\n  split: train\n  held_out: 0.05\nrecipe: {{}}\n"
    )
    argv = ["configs/it.yaml", f"run.output_dir={folder}", f"data.path={PRIVATE}"]
    write(folder, "provenance", {"launches": [{"argv": argv, "python": "3.11.7"}]})
    (folder / "report.html").write_text(f"<p>in {folder}, from {PRIVATE}, <a href='https://hub.test/a/b'>here</a></p>")
    write(folder, "tokenizer_config", {"name_or_path": str(folder / "tokenizer"), "chat": "see /usr/share/doc"})
    return folder


def write(folder: Path, name: str, content: dict) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def benchmark() -> dict:
    def arm(name, **numbers):
        return {"arm": name, "exit_layer": None, "num_draft_tokens": None, "error": None, **numbers}

    counts = {"num_outputs": 8, "equal_outputs": 8}
    fast = arm("self-speculative", tokens_per_second=30.25, speedup=1.512, mean_acceptance_length=2.6, **counts)
    fast["speedup_by_repeat"] = [1.6, 1.4]
    failed = {**arm("assistant_early_exit"), "error": "IndexError: index 2 is out of range"}
    return {
        "conditions": {"cpu": "a fast processor", "threads": 2, "commit": None},
        "greedy": [
            arm("plain", tokens_per_second=20.0, speedup=1.0, **counts),
            {**fast, "exit_layer": 2, "num_draft_tokens": 5},
            failed,
        ],
    }


def test_the_cards_metadata_is_what_the_hub_reads(run_dir):
    data = ModelCard(card.model_card(run_dir, license="apache-2.0")).data
    assert data.library_name == "transformers"
    assert {"layerskip", "self-speculative-decoding"} <= set(data.tags)
    assert (data.license, data.base_model, data.datasets) == ("apache-2.0", "someone/small-model", ["someone/text"])


def test_the_card_tells_the_runs_own_numbers(run_dir):
    text = card.model_card(run_dir, "someone/quick")
    for said in (
        "# quick\n",
        "2 of 16 layers draft up to 5 tokens",
        'AutoModelForCausalLM.from_pretrained("someone/quick")',
        "layerskip.generate(model, **inputs, max_new_tokens=64)",
        "| `max_dropout` | 0.1 |",
        "| `exits` | 2, 10 |",
        "| training tokens | 123,456 |",
        "| 2 | 7 → 6 | 0.125 → 0.25 | 0 → 0.5 |\n| 10 | 14 | 0.25 | 0.5 |\n",  # by depth, not by letters
        "| whole model | 3.25 → 3.5 |",
        "Its loss changed by +7.7%.",
        "| before training | 3.2500 | 25.79 |\n| after training | 3.5000 | 33.12 |",
        "2.50 tokens a verify step, 1.50 times (9 in 10: 1.40 to 1.62) plain",
        "a processor",
    ):
        assert said in text
    assert str(run_dir.parent) not in text


def test_a_measured_speed_takes_the_forecasts_place(run_dir):
    write(run_dir, "benchmark", benchmark())
    text = card.model_card(run_dir)
    assert "| self-speculative | 2 | 5 | 30.25 | 1.51 (1.4 to 1.6) | 2.6 | 8 of 8 |" in text
    assert "| assistant_early_exit (failed) |" in text
    assert "cpu a fast processor, threads 2" in text
    assert "Forecast" not in text
    assert "None" not in text


def test_a_plain_checkpoint_has_a_card_too(tiny_checkpoint):
    text = card.model_card(tiny_checkpoint)
    assert "exit_layer=2, num_draft_tokens=4" in text
    assert "## Recipe" not in text
    assert "## Exits" not in text
    assert ModelCard(text).data.base_model is None


@pytest.mark.parametrize("name", ["/data/models/base", "./base", "~/base", "null", "runs/a/b"])
def test_a_local_base_model_is_not_named(run_dir, name):
    (run_dir / "config.yaml").write_text(f"model:\n  name_or_path: {name}\n")
    assert ModelCard(card.model_card(run_dir)).data.base_model is None


def test_a_card_is_written_anew_until_somebody_makes_it_theirs(run_dir):
    path = run_dir / "README.md"
    card.write_model_card(run_dir, license="mit")
    write(run_dir, "benchmark", benchmark())
    card.write_model_card(run_dir)
    assert "a fast processor" in path.read_text()
    assert ModelCard.load(path).data.license == "mit"  # as it was said once
    own = path.read_text().replace(card._MARK, "My own words.")
    path.write_text(own)
    write(run_dir, "benchmark", {})
    card.write_model_card(run_dir)
    assert path.read_text() == own


def test_only_what_belongs_to_the_model_goes(run_dir):
    card.write_model_card(run_dir)
    assert {file.name for file in shared_files(run_dir)} == PUBLISHED


def test_no_file_that_goes_names_a_local_path(run_dir):
    card.write_model_card(run_dir)
    local = [str(run_dir), str(run_dir.parent), str(Path.cwd()), str(Path.home()), PRIVATE, "/data/private"]
    staged = run_dir.parent / "staged"
    stage(shared_files(run_dir), staged)
    names = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert names == PUBLISHED
    for name in names:
        content = (staged / name).read_bytes().decode()
        assert [path for path in local if path in content] == [], name
    argv = json.loads((staged / "provenance.json").read_text())["launches"][0]["argv"]
    assert argv == ["configs/it.yaml", "run.output_dir=quickstart", "data.path=./of mine.jsonl"]
    assert "https://hub.test/a/b" in (staged / "report.html").read_text()
    assert str(run_dir) in (run_dir / "provenance.json").read_text()  # here nothing is changed


def test_what_is_staged_outlives_what_it_was_staged_from(run_dir):
    weights = run_dir / "model.safetensors"
    weights.write_bytes(b"\0weights")
    stage(shared_files(run_dir), run_dir.parent / "staged")
    assert (run_dir.parent / "staged" / weights.name).stat().st_ino == weights.stat().st_ino  # no copy
    weights.unlink()
    assert (run_dir.parent / "staged" / weights.name).read_bytes() == b"\0weights"


def test_where_files_cannot_be_linked_they_go_all_the_same(run_dir, loopback: Hub, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no links across file systems")

    monkeypatch.setattr(os, "link", refuse)
    (run_dir / "model.safetensors").write_bytes(b"weights")
    hub.upload(run_dir, "someone/quick")
    assert loopback.files("someone/quick")["model.safetensors"] == b"weights"
    assert set(loopback.files("someone/quick")) == PUBLISHED


def test_scrubbing_cuts_paths_and_leaves_what_only_looks_like_one():
    paths = {"/work/me/run": "run", "/work/me": "~"}
    assert scrub("/work/me/run/x and /work/me/run-2, /work/me", paths) == "run/x and ~/run-2, ~"
    assert scrub("path=/work/me/x file:///work/me/y aB/work/me/==", paths) == "path=~/x file://~/y aB/work/me/=="
    said = "a/b/c https://x.y/z/w <path d='M1/2/3'/> +/Ab/Cd== and/or 1/2/3 ~/x/y"
    assert scrub(said, {}, everywhere=True) == said
    assert scrub('{"file": "/mnt/disk/some.txt"}', {}, everywhere=True) == '{"file": "./some.txt"}'


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "aB3" * 11, "ghp_" + "a" * 36, "AKIA" + "A1" * 8, "sk-" + "a" * 40, "-----BEGIN RSA PRIVATE KEY-----"],
)
def test_a_secret_stops_the_upload_and_is_not_repeated(run_dir, secret):
    (run_dir / "prompts" / "test.jsonl").write_text(json.dumps({"prompt": f"key = '{secret}'"}))
    with pytest.raises(hub.HubError, match=r"test\.jsonl holds what looks like an? .*--exclude") as caught:
        shared_files(run_dir)
    assert secret not in str(caught.value)
    assert "prompts/test.jsonl" not in {file.name for file in shared_files(run_dir, exclude=["prompts/*"])}


def test_ones_own_token_is_a_secret_whatever_it_looks_like():
    assert find_secret("x letmein y", token="letmein") == "your own token"
    assert find_secret("hf_transfer, sk-learn, commit 3e217a07b9f3de86e609185bb4ae36f4977b4524") is None


def test_the_cards_own_snippets_run(tiny_checkpoint, capsys):
    text = card.model_card(tiny_checkpoint, repo_id=str(tiny_checkpoint))
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(snippet, "README.md", "exec"), names)
        names.setdefault("plain", names["output"])
    assert names["output"].tolist() == names["plain"].tolist()


def test_results_survive_the_hubs_own_reader(run_dir):
    write(run_dir, "benchmark", benchmark())
    read = ModelCard(card.model_card(run_dir, "someone/quick")).data
    assert read.model_name == "quick"
    found = {(r.metric_type, r.metric_name): r.metric_value for r in read.eval_results}
    assert all(isinstance(result, EvalResult) for result in read.eval_results)
    assert found["perplexity", "perplexity"] == pytest.approx(2.718281828**3.5)
    assert found["accuracy", "greedy agreement of exit layer 2 with the last layer"] == 0.25
    assert found["speedup", "speedup of self-speculative over plain decoding, greedy"] == 1.512
    assert {r.dataset_type for r in read.eval_results} == {"someone/text", "prompts"}


@pytest.mark.parametrize(
    ("base_card", "asked", "said"),
    [
        ("---\nlicense: mit\n---\n# Base\n", None, "mit"),
        ("---\nlicense: mit\n---\n# Base\n", "apache-2.0", "apache-2.0"),
        ("# Base\n", None, None),
        ("---\nlicense: [\n---\n", None, None),
        (None, None, None),
    ],
)
def test_the_licence_is_the_bases_unless_given_and_missed_if_nobody_names_it(run_dir, tmp_path, base_card, asked, said):
    base = tmp_path / "a-base"
    base.mkdir()
    (base / "LICENSE").write_text("its text")
    if base_card is not None:
        (base / "README.md").write_text(base_card)
    (run_dir / "config.yaml").write_text(f"model:\n  name_or_path: {base}\n")
    text = card.model_card(run_dir, license=asked)
    assert ModelCard(text).data.get("license") == said
    assert ("No licence was named" in text) == (said is None)
    assert "from a local copy of a-base" in text
    assert str(base) not in text
    assert ModelCard(card.model_card(run_dir, base_model="some/base")).data.base_model == "some/base"
    licence = next(file for file in shared_files(run_dir) if file.name == "LICENSE")
    assert licence.source.read_text() == "its text"


def test_the_card_names_data_pictures_and_every_way_to_use_it(run_dir):
    text = card.model_card(run_dir, "someone/quick")
    for said in (
        "* local text: of mine.jsonl\n* [someone/text](https://huggingface.co/datasets/someone/text), split train",
        "5% of it was held out",
        "![tune](tune.png)",
        "![speed](plots/speed.svg)",
        "transformers serve someone/quick --trust-remote-code",
        'from_pretrained("someone/quick", trust_remote_code=True)',
        f"pip install {REQUIREMENTS.strip()}",  # the library's distribution is not named as its package is
    ):
        assert said in text
    (run_dir / "custom_generate" / "generate.py").unlink()
    assert "trust" not in card.model_card(run_dir)


def test_a_downloaded_run_does_not_pass_its_base_off_as_the_hubs(run_dir, tmp_path):
    """What is left of a local path in shared settings is no Hub id to whoever shares the run again."""
    base = tmp_path / "base"
    base.mkdir()
    (run_dir / "config.yaml").write_text(f"model:\n  name_or_path: {base}\n")
    again = tmp_path / "again"
    stage(shared_files(run_dir), again)
    base.rmdir()
    assert ModelCard(card.model_card(again)).data.base_model is None
    assert "from a local copy of base" in card.model_card(again)
    assert read_run(again).settings["model"]["name_or_path"] == "./base"


@pytest.fixture
def loopback(monkeypatch):
    """The Hub on loopback, as huggingface_hub sees it in this process, with a token that may write to `someone`."""
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        close_session()
        yield server
    close_session()


def test_an_upload_brings_what_it_should_and_a_second_one_nothing(run_dir, loopback: Hub):
    address = hub.upload(run_dir, "someone/quick", private=True, revision="trial/2", license="mit")
    assert address == f"{loopback.url}/someone/quick/tree/trial/2"
    repository = loopback.repositories["someone/quick"]
    assert repository.private
    assert loopback.files("someone/quick") == {}  # main
    there = loopback.files("someone/quick", "trial/2")
    assert {name: content.decode() for name, content in there.items()} == {
        file.name: file.source.read_text() if file.text is None else file.text for file in shared_files(run_dir)
    }
    assert ModelCard(there["README.md"].decode()).data.license == "mit"
    before = loopback.counts()
    assert (before["object"], before["commit"]) == (1, 1)
    hub.upload(run_dir, "someone/quick", private=True, revision="trial/2", license="mit")
    after = loopback.counts()
    assert (after["object"], after["commit"]) == (1, 1)
    ModelCard(there["README.md"].decode()).validate()  # asks the server; raises ValueError


@pytest.mark.parametrize("fault", ["drop", "500"])
def test_a_connection_that_breaks_once_is_tried_again(run_dir, loopback: Hub, fault):
    (run_dir / "model.safetensors").write_bytes(os.urandom(300_000))
    oid = sha256(run_dir / "model.safetensors")
    loopback.faults[oid] = (fault, 1)
    hub.upload(run_dir, "someone/quick")
    assert loopback.counts()["object"] == 2
    assert loopback.files("someone/quick")["model.safetensors"] == (run_dir / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("token", "repo_id", "said"),
    [
        ("hf_revoked", "someone/quick", r"does not accept the token \(401: Invalid credentials.*hf auth login"),
        ("hf_reader", "someone/quick", r"may not write to someone/quick \(403: .*write access to someone, or another"),
        (WRITER, "stranger/quick", r"may not write to stranger/quick \(403: "),
    ],
)
def test_no_rights_are_told_in_one_line(run_dir, loopback: Hub, monkeypatch, token, repo_id, said):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(hub.HubError, match=said) as caught:
        hub.upload(run_dir, repo_id)
    assert "\n" not in str(caught.value)
    assert token not in str(caught.value)
    assert loopback.repositories == {}


def test_a_public_repository_is_not_used_where_a_private_one_was_asked_for(run_dir, loopback: Hub):
    hub.upload(run_dir, "someone/quick")
    commits = loopback.counts()["commit"]
    (run_dir / "metrics.jsonl").write_text("secret figures")
    with pytest.raises(hub.HubError, match="someone/quick is there already, and public"):
        hub.upload(run_dir, "someone/quick", private=True)
    assert loopback.counts()["commit"] == commits


def test_metadata_that_the_hub_refuses_is_told_in_one_line(run_dir, loopback: Hub):
    with pytest.raises(hub.HubError, match=r'metadata \("license" must be .*\): mend') as caught:
        hub.upload(run_dir, "someone/quick", license="My Own")
    assert "\n" not in str(caught.value)
    assert loopback.repositories == {}


def test_no_network_and_offline_mode_are_told_in_one_line(run_dir, loopback: Hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(
        hub.UnreachableError, match=r"cannot reach http://127\.0\.0\.1:9 \(.+\): check the network"
    ) as caught:
        hub.upload(run_dir, "someone/quick")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    with pytest.raises(hub.HubError, match="HF_HUB_OFFLINE is set"):
        hub.upload(run_dir, "someone/quick")


def test_what_cannot_be_uploaded_is_refused_before_any_request(run_dir, loopback: Hub, monkeypatch, tmp_path):
    for name in ("quick", "a/b/c", "someone/bad name", "someone/--"):
        with pytest.raises(hub.HubError, match="names no repository"):
            hub.upload(run_dir, name)
    for branch in ("", "a b", "refs/pr/1", "-x", "a..b", "x.lock", "a//b", "a\nb", "x^"):
        with pytest.raises(hub.HubError, match="cannot name a branch"):
            hub.upload(run_dir, "someone/quick", revision=branch)
    with pytest.raises(hub.HubError, match="is no folder"):
        hub.upload(tmp_path / "nowhere", "someone/quick")
    with pytest.raises(hub.HubError, match=r"holds no config\.json"):
        hub.upload(tmp_path, "someone/quick")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(hub.HubError, match="no Hugging Face token"):
        hub.upload(run_dir, "someone/quick")
    assert not (run_dir / "README.md").exists()
    monkeypatch.setenv("HF_TOKEN", WRITER)
    write(run_dir, "model.safetensors.index", {"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    with pytest.raises(hub.HubError, match=r"holds no model-00001-of-00002\.safetensors"):
        hub.upload(run_dir, "someone/quick")
    assert loopback.requests == []


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_damaged_record_is_named(run_dir):
    (run_dir / "benchmark.json").write_text("[1, 2")
    with pytest.raises(hub.HubError, match=r"benchmark\.json is not a JSON object"):
        card.model_card(run_dir)


@pytest.mark.parametrize(
    ("key", "value", "file"),
    [
        ("adapters", {"rank": 4, "exits": [2]}, ADAPTERS_FILE),
        ("draft_vocabulary", {"size": 64}, DRAFT_VOCABULARY_FILE),
    ],
)
def test_a_checkpoint_that_lost_what_its_config_names_is_not_uploaded(run_dir, key, value, file):
    config = json.loads((run_dir / "config.json").read_text())
    config["layerskip"][key] = value
    write(run_dir, "config", config)
    with pytest.raises(hub.HubError, match=f"holds no {file}"):
        shared_files(run_dir)
    save_file({"2.up.weight": torch.ones(1)}, run_dir / file)
    assert file in {shared.name for shared in shared_files(run_dir)}


def test_adapters_of_other_exits_than_the_config_names_are_not_uploaded(run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    config["layerskip"]["adapters"] = {"blocks": 1, "exits": [2]}
    write(run_dir, "config", config)
    save_file({"1.layers.0.weight": torch.ones(1)}, run_dir / ADAPTERS_FILE)
    with pytest.raises(hub.HubError, match=r"has adapters for exit 1, and config\.json names 2: copy the file"):
        shared_files(run_dir)
    (run_dir / ADAPTERS_FILE).write_bytes(b"torn")
    with pytest.raises(hub.HubError, match="cannot be read"):
        shared_files(run_dir)


def test_the_card_tells_of_a_draft_vocabulary(run_dir):
    assert "most frequent tokens" not in card.model_card(run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    config["layerskip"]["draft_vocabulary"] = {"size": 8192}
    write(run_dir, "config", config)
    assert "The draft's head knows the 8,192 most frequent tokens" in card.model_card(run_dir)


def test_the_card_shows_what_was_drafted_where_it_was_no_chain(run_dir):
    write(run_dir, "generation_config", {"layerskip": {"exit_layer": 2, "num_draft_tokens": 4, "tree": "s3_k2_d6"}})
    record = benchmark()
    record["greedy"][1]["drafts"] = "3,2,1"
    write(run_dir, "benchmark", record)
    text = card.model_card(run_dir)
    assert "2 of 16 layers draft candidate trees (s3_k2_d6)." in text
    assert "| self-speculative | 2 | 3,2,1 | 30.25 |" in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"exit_layer": "auto", "num_draft_tokens": "auto"},
            "in each step the exit that pays best, or none, drafts as",
        ),
        ({"exit_layer": "auto", "num_draft_tokens": 3}, "or none, drafts up to 3 tokens a step."),
        ({"exit_layer": 2, "num_draft_tokens": "auto"}, "2 of 16 layers draft as many tokens a step as pay."),
        ({"exit_layer": 2, "num_draft_tokens": 3, "tree": [2, 1]}, "2 of 16 layers draft candidate trees (2,1)."),
        ({"exit_layer": 2, "num_draft_tokens": 3, "lookup": "hybrid"}, "a step, where a prompt lookup finds nothing."),
        ({"exit_layer": None, "num_draft_tokens": 0}, "Tuned setting: plain decoding, without drafts."),
        ({"exit_layer": None, "num_draft_tokens": 0, "lookup": "only"}, "drafts come from a prompt lookup alone."),
    ],
)
def test_the_card_says_any_setting_in_words(run_dir, setting, said):
    write(run_dir, "generation_config", {"layerskip": setting})
    text = card.model_card(run_dir)
    assert said in text
    assert "auto of" not in text
    drafts = setting["exit_layer"] is not None or "lookup" in setting
    assert ("drafts as the checkpoint was tuned to" in text) == drafts
    assert ("is tuned to plain decoding" in text) != drafts
    assert "carries no tuned setting" not in text


def test_the_card_tells_what_tune_measured_of_a_tree(run_dir):
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    measured = {"mean_acceptance_length": 2.375, "speedup": 1.75}
    evaluation["setting"] |= {"tree": [2, 1, 1], "chosen_on": "tune", "measured": measured}
    write(run_dir, "evaluation", evaluation)
    text = card.model_card(run_dir)
    assert "Not measured" not in text
    assert "1.75 times plain `generate`" in text
    assert "for exit layer 2 and trees 2,1,1: 2.50 tokens a verify step" in text
