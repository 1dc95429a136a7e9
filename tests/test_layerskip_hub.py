"""The model card says what the run's files say; an upload sends what it should and nothing else."""

import importlib
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, Response
from huggingface_hub.utils import filter_repo_objects

from layerskip import card, hub
from layerskip.adapters import ADAPTERS_FILE
from layerskip.recipe import Recipe
from layerskip.vocabulary import DRAFT_VOCABULARY_FILE

PUBLISHED = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    *("tokenizer_config.json", "evaluation.json", "metrics.jsonl", "prompts/test.jsonl", "prompts/validation.jsonl"),
}
KEPT = {
    *("config.yaml", "provenance.json", "checkpoints/step-000010/model.safetensors", ".env", "notes.txt"),
    *("checkpoints/step-000010/config.json", "checkpoints/step-000010/optimizer.pt", "optimizer.pt"),
    *("data/train.bin", "wandb/run-1/output.log", "tokenizer/tokenizer.json", "wandb/config.json"),
}


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
        "setting": {**setting, "forecast": {"mean_acceptance_length": 2.5, "speedup": 1.5}},
        "steps": 20,
        "tokens": 123456,
        "forecast_conditions": {"device": "a processor", "threads": 2, "dtype": "bfloat16", "batch_size": 1},
    }
    write(folder, "evaluation", evaluation)
    (folder / "config.yaml").write_text(
        f"run:\n  output_dir: {folder}\nmodel:\n  name_or_path: someone/small-model\n  architecture: {{}}\n"
        "data:\n  path: []\n  dataset: someone/text\nrecipe: {}\n"
    )
    return folder


def write(folder: Path, name: str, content: dict) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def benchmark() -> dict:
    def arm(name, **numbers):
        return {"arm": name, "exit_layer": None, "num_draft_tokens": None, "error": None, **numbers}

    counts = {"num_outputs": 8, "equal_outputs": 8}
    fast = arm("self-speculative", tokens_per_second=30.25, speedup=1.512, mean_acceptance_length=2.6, **counts)
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
        "3.2500 before training, 3.5000 after (+7.7%)",
        "2.50 tokens a verify step, 1.50 times plain",
        "a processor",
    ):
        assert said in text
    assert str(run_dir.parent) not in text


def test_a_measured_speed_takes_the_forecasts_place(run_dir):
    write(run_dir, "benchmark", benchmark())
    text = card.model_card(run_dir)
    assert "| self-speculative | 2 | 5 | 30.25 | 1.51 | 2.6 | 8 of 8 |" in text
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
    found = {path.relative_to(run_dir).as_posix() for path in hub.upload_files(run_dir)}
    assert found == PUBLISHED


class Hub:
    """Takes the calls of `huggingface_hub.HfApi`, and fails if told to."""

    endpoint = "https://hub.test"
    error: Exception | None = None

    def __init__(self, token: str) -> None:
        self.token = token
        Hub.calls = []

    def create_repo(self, repo_id, **arguments):
        Hub.calls.append(("create_repo", repo_id, arguments))
        if Hub.error is not None:
            raise Hub.error

    def create_branch(self, repo_id, **arguments):
        Hub.calls.append(("create_branch", repo_id, arguments))

    def upload_folder(self, *, repo_id, **arguments):
        Hub.calls.append(("upload_folder", repo_id, arguments))


@pytest.fixture
def fake_hub(monkeypatch):
    monkeypatch.setattr(hub, "HfApi", Hub)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_secret")
    monkeypatch.setattr(Hub, "error", None)
    return Hub


def test_upload_sends_the_run_in_one_commit(run_dir, fake_hub):
    address = hub.upload(run_dir, "someone/quick", private=True, revision="trial")
    assert address == "https://hub.test/someone/quick/tree/trial"
    names = [name for name, _, _ in fake_hub.calls]
    assert names == ["create_repo", "create_branch", "upload_folder"]
    assert fake_hub.calls[0][2] == {"private": True, "exist_ok": True}
    assert fake_hub.calls[1][2] == {"branch": "trial", "exist_ok": True}
    sent = fake_hub.calls[2][2]
    assert sent["revision"] == "trial"
    everything = [path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()]
    assert set(filter_repo_objects(everything, allow_patterns=sent["allow_patterns"])) == PUBLISHED


def refused(status: int) -> HfHubHTTPError:
    http = importlib.import_module(Response.__module__.partition(".")[0])  # httpx or its successor, as installed
    response = Response(status, request=http.Request("POST", "https://hub.test/api"))
    return HfHubHTTPError("no\nfor many reasons", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refused(403), "the token may not write to someone/quick"),
        (refused(401), "the token may not write to someone/quick"),
        (refused(500), "the Hub refused someone/quick \\(500: no\\)"),
        (HTTPError("Name or service not known"), "cannot reach https://hub.test \\(Name or service not known\\)"),
        (OfflineModeIsEnabled("offline mode\nis on"), "cannot reach https://hub.test \\(offline mode\\)"),
    ],
)
def test_the_hubs_errors_are_one_line(run_dir, fake_hub, error, said):
    fake_hub.error = error
    with pytest.raises(hub.HubError, match=said) as caught:
        hub.upload(run_dir, "someone/quick")
    assert "\n" not in str(caught.value)


def test_what_cannot_be_uploaded_is_refused_before_any_call(run_dir, fake_hub, monkeypatch, tmp_path):
    fake_hub.calls = []
    for name in ("quick", "a/b/c", "someone/bad name", "someone/--"):
        with pytest.raises(hub.HubError, match="names no repository"):
            hub.upload(run_dir, name)
    with pytest.raises(hub.HubError, match="is no folder"):
        hub.upload(tmp_path / "nowhere", "someone/quick")
    with pytest.raises(hub.HubError, match=r"holds no config\.json"):
        hub.upload(tmp_path, "someone/quick")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(hub.HubError, match="no Hugging Face token"):
        hub.upload(run_dir, "someone/quick")
    assert not (run_dir / "README.md").exists()
    write(run_dir, "model.safetensors.index", {"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    with pytest.raises(hub.HubError, match=r"holds no model-00001-of-00002\.safetensors"):
        hub.upload(run_dir, "someone/quick")
    assert fake_hub.calls == []


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
        hub.upload_files(run_dir)
    (run_dir / file).write_text("{}")
    assert run_dir / file in hub.upload_files(run_dir)


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
