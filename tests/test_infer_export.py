"""`export`: what it writes works, what it cannot write is refused in one line, and it can be taken back."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from infer.command import main
from layerskip.checkpoint.settings import Setting, store_setting
from layerskip.checkpoint.vocabulary import store_draft_vocabulary
from layerskip.decode.generation import SelfSpeculativeOutput
from layerskip.model.adapters import attach_adapters
from tests import tiny

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def export(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["export", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def tuned(tmp_path, tokenizer) -> Path:
    """Folder of a tiny Llama tuned to three tokens by two layers, with what a run has beside it."""
    folder = tmp_path / "run"
    model = tiny.llama(vocab_size=len(tokenizer))
    store_setting(model, Setting(2, 3))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("prompts/test.jsonl", "checkpoints/step-000010/optimizer.pt", ".env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_decodes_by_itself_and_the_run_is_as_it_was(tuned, tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    before = content(tuned)
    code, out, err = export(capsys, tuned, "--custom-generate", "--output", tmp_path / "copy")
    assert code == 0
    assert json.loads(out)["folder"] == str(tmp_path / "copy")
    assert "trust_remote_code=True" in err
    assert content(tuned) == before
    kept = {name for name in before if not name.startswith(("checkpoints", "."))}
    assert content(tmp_path / "copy").keys() == kept | {
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
    inputs = tokenizer("def add(", return_tensors="pt", return_token_type_ids=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", trust_remote_code=True).eval()
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path / "copy").eval()
    output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert isinstance(output, SelfSpeculativeOutput)
    assert torch.equal(output.sequences, ordinary.generate(**inputs, **GREEDY))


def test_in_place_and_back(tuned, capsys):
    before = content(tuned)
    code, out, err = export(capsys, tuned, "--custom-generate", "--assistant-early-exit", "--dtype", "float32")
    assert code == 0
    assert json.loads(out)["assistant_early_exit"] == 2
    assert "one sequence at a time" in err
    stored = json.loads((tuned / "generation_config.json").read_text())
    assert (stored["assistant_early_exit"], stored["num_assistant_tokens"]) == (2, 3)
    assert (tuned / "custom_generate" / "generate.py").is_file()
    code, out, _ = export(capsys, tuned, "--remove")
    assert code == 0
    assert json.loads(out)["removed"] == ["custom_generate", "assistant_early_exit"]
    after = content(tuned)
    assert json.loads(after.pop("generation_config.json"))["layerskip"] == {"exit_layer": 2, "num_draft_tokens": 3}
    del before["generation_config.json"]
    assert after == before
    code, _, err = export(capsys, tuned, "--remove")
    assert (code, err.count("\n")) == (2, 1)
    assert "nothing to remove" in err


def test_the_draft_has_the_tokenizer_and_drafts_for_its_target(tuned, tmp_path, tokenizer, capsys):
    store_draft_vocabulary(tuned, torch.arange(64))
    code, out, err = export(capsys, tuned, "--draft", tmp_path / "draft", "--dtype", "float32")
    assert code == 0
    written = json.loads(out)
    assert (written["exit_layer"], written["num_hidden_layers"], written["dtype"]) == (2, 2, "float32")
    assert "assistant_model" in err
    assert "the draft has the whole head" in err
    target = AutoModelForCausalLM.from_pretrained(tuned).eval()
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    assert draft.num_parameters() == written["parameters"] < target.num_parameters()
    assert draft.generation_config.num_assistant_tokens == 3
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab() == tokenizer.get_vocab()
    inputs = tokenizer("def add(", return_tensors="pt", return_token_type_ids=False)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=draft), target.generate(**inputs, **GREEDY))
    code, out, _ = export(capsys, tuned, "--draft", tmp_path / "three", "--exit-layer", "3", "--dtype", "bfloat16")
    assert code == 0
    assert (json.loads(out)["num_hidden_layers"], json.loads(out)["dtype"]) == (3, "bfloat16")


def test_a_half_precision_checkpoint_gives_a_half_precision_draft(tuned, tmp_path, capsys):
    AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.bfloat16).save_pretrained(tuned)
    _, out, _ = export(capsys, tuned, "--draft", tmp_path / "draft")
    assert json.loads(out)["dtype"] == "bfloat16"  # whatever this machine computes in


def test_an_adapter_is_told_of_and_one_that_does_not_fold_refused(tuned, tmp_path, tokenizer, capsys):
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype="float32")
    attach_adapters(model, [2], 6)
    model.save_pretrained(tuned)
    code, out, err = export(capsys, tuned, "--draft", tmp_path / "draft", "--dtype", "float32")
    assert (code, json.loads(out)["num_hidden_layers"]) == (0, 3)
    assert "the adapter of exit 2 became one more layer, 3 in all" in err
    torch.manual_seed(0)
    model = tiny.llama(vocab_size=len(tokenizer), hidden_act="gelu")
    attach_adapters(model, [2], 6)
    model.save_pretrained(tuned)
    code, out, err = export(capsys, tuned, "--draft", tmp_path / "other", "--exit-layer", "2", "--dtype", "float32")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "it needs a silu in its MLP, not gelu: carry custom_generate instead" in err
    assert not (tmp_path / "other").exists()


def test_an_architecture_without_early_exit_is_refused_before_anything_is_written(tmp_path, tokenizer, capsys):
    folder = tmp_path / "gpt2"
    model_type, arguments = tiny.ARCHITECTURES["gpt2"]
    config = AutoConfig.for_model(model_type, **{**arguments, "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    before = content(folder)
    code, out, err = export(capsys, folder, "--assistant-early-exit", "--exit-layer", "2")
    assert (code, out) == (2, "")
    assert "early exit does not work with GPT2LMHeadModel" in err.splitlines()[-1]
    assert err.endswith("use --custom-generate instead\n")
    assert content(folder) == before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{run}"], "nothing to export: give --custom-generate, --assistant-early-exit or --draft OUT"),
        (["{run}", "--output", "{tmp}/new"], "nothing to export"),
        (["{run}", "--draft", "{tmp}/new", "--remove"], "leave --remove out, or run export once for each"),
        (["{run}", "--draft", "{tmp}/new", "--output", "{tmp}/b"], "leave --output out"),
        (["{run}", "--remove", "--custom-generate"], "--remove takes out what --custom-generate puts in"),
        (["{run}", "--custom-generate", "--exit-layer", "2"], "--exit-layer 2 does nothing with --custom-generate"),
        (["{run}", "--draft", "{run}"], "is there already: give a new folder"),
        (["{run}", "--custom-generate", "--output", "{run}"], "is there already: give a new folder"),
        (["{tmp}/nowhere", "--custom-generate"], "does not exist"),
        (["someone/model", "--custom-generate"], "someone/model is on the Hub: download it"),
        (["{run}", "--draft", "{tmp}/new", "--exit-layer", "4"], "exit_layer=4 is out of range"),
        (["{untuned}", "--custom-generate"], "carries no setting to decode with: run python -m infer tune"),
        (["{untuned}", "--assistant-early-exit"], "carries no tuned exit layer: give --exit-layer"),
        (["{untuned}", "--draft", "{tmp}/new"], "carries no tuned exit layer: give --exit-layer"),
        (["{off}", "--draft", "{tmp}/new"], "is tuned to draft with no layer: give --exit-layer"),
        (["{auto}", "--draft", "{tmp}/new"], "is tuned to choose its exit as it goes (auto), and this needs one: give"),
        (["{auto}", "--assistant-early-exit"], "and this needs one: give --exit-layer"),
        (["{broken}", "--draft", "{tmp}/new"], "holds no JSON object: mend it"),
    ],
)
def test_errors_are_one_line(argv, said, tuned, tiny_checkpoint, tmp_path, capsys):
    settings = {"off": {"layerskip": {"exit_layer": None, "num_draft_tokens": 0}}, "broken": [1]}
    settings["auto"] = {"layerskip": {"exit_layer": "auto", "num_draft_tokens": "auto"}}
    folders = {"run": tuned, "untuned": tiny_checkpoint, "tmp": tmp_path}
    for name, setting in settings.items():
        folders[name] = tmp_path / name
        folders[name].mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (folders[name] / file).write_bytes((tuned / file).read_bytes())
        (folders[name] / "generation_config.json").write_text(json.dumps(setting))
    code, out, err = export(capsys, *(part.format(**folders) for part in argv))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "new").exists()


def test_a_draft_of_a_checkpoint_that_drafts_auto_tokens_leaves_their_number_to_transformers(tuned, tmp_path, capsys):
    path = tuned / "generation_config.json"
    path.write_text(json.dumps({"layerskip": {"exit_layer": 2, "num_draft_tokens": "auto"}}))
    assert export(capsys, str(tuned), "--draft", str(tmp_path / "draft"))[0] == 0
    made = json.loads((tmp_path / "draft" / "generation_config.json").read_text())
    assert made.get("num_assistant_tokens") in (None, GenerationConfig().num_assistant_tokens)
