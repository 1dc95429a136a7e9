"""The door of `infer`: how it is called, how fast it answers, and what it says when something is wrong."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from infer.command import COMMANDS
from infer.source import local_folder
from infer.terminal import Terminal
from tests import tiny
from tests.programs import run

CHECKOUT = Path(__file__).parents[1]


@pytest.mark.parametrize("door", [["-m", "infer"], ["infer"], [str(CHECKOUT / "infer")]])
def test_three_doors(door, tmp_path):
    here = tmp_path if Path(door[-1]).is_absolute() else CHECKOUT
    result = subprocess.run([sys.executable, *door, "--help"], cwd=here, capture_output=True, text=True, check=True)
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("argv", [["generate", "run", "hi"], ["push", "run", "--repo", "me/it"]])
def test_a_python_outside_the_environment_is_told_in_one_line(argv):
    python = [sys.executable, "-S", "-m", "infer"]  # -S: without what is installed
    result = subprocess.run([*python, *argv], cwd=CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "has no module 'rich': `source .venv/bin/activate`, or `pip install -e '.[infer]'`" in result.stderr


def test_help_and_wrong_flags_import_no_torch():
    script = """
import sys
from infer.command import COMMANDS, main
from infer.terminal import Terminal
for argv in [["--help"], *([name, "--help"] for name in COMMANDS), ["generate", "no/such/model", "hi"],
             ["push", "nowhere", "--repo", "me/it", "--dry-run"], ["benchmark", "no/such/model"]]:
    try:
        main(argv)
    except SystemExit:
        pass
heavy = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, check=True)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sing"], "invalid choice: 'sing'"),
        ([], "required: COMMAND"),
        (["generate", "./nowhere", "hi"], "./nowhere does not exist: give the folder"),
        (["benchmark", "runs/nothing-of-this-name"], "runs/nothing-of-this-name does not exist: give the folder"),
        (["generate", "{tmp}/a/b", "hi"], "does not exist"),
        (["generate", "bad name", "hi"], "neither a folder nor a Hub id"),
        (["generate", "{tmp}", "hi"], "holds no config.json"),
        (["generate", "{model}/config.json", "hi"], "is a file"),
        (["generate", "{model}", "hi", "--exit-layer", "0"], "--exit-layer: '0' is not a number of layers"),
        (["generate", "{model}", "hi", "--exit-layer", "all"], "'all' is not a number of layers, 1 or more, or auto"),
        (["generate", "{model}", "hi", "--exit-layer", "4"], "this model has 4 layers, so choose 1 to 3"),
        (["generate", "{model}", "hi", "--num-draft-tokens", "-1"], "'-1' is not a whole number, 1 or more"),
        (["generate", "{model}", "hi", "--temperature", "-1"], "'-1' is not a number, 0 or more"),
        (["generate", "{model}", "hi", "--temperature", "nan"], "'nan' is not a number, 0 or more"),
        (["generate", "{model}", "hi", "--temperature", "1", "--top-p", "1.5"], "'1.5' is not a number above 0"),
        (["generate", "{model}", "hi", "--top-k", "5"], "--top-k 5 does nothing at temperature 0"),
        (["generate", "{model}", "hi", "--tree", "wide"], "--tree: 'wide' is no shape: write s3_k2_d6"),
        (["generate", "{model}", "hi", "--tree", "3,0"], "--tree: '3,0' is no shape"),
        (["generate", "{model}", "hi", "--tree", "s2_k2_d9"], "--tree s2_k2_d9: d is the number of tokens verified"),
        (["generate", "{model}", "hi", "--tree", "40,40"], "--tree (40, 40) has 1640 tokens, more than 256"),
        (["generate", "{model}", "hi", "--tree", "3,2"], "--tree goes with an early exit, and {model} carries no"),
        (["generate", "{model}", "hi", "--lookup", "branch"], "--lookup goes with an early exit, and {model} carries"),
        (["generate", "{model}", "hi", "--lookup", "some"], "invalid choice: 'some'"),
        (["generate", "{model}", "hi", "--lookup", "hybrid", "--exit-layer", "none"], "--lookup hybrid goes with an"),
        (["generate", "{model}", "hi", "--tree", "3", "--exit-layer", "none"], "--tree goes with an early exit: leave"),
        (["generate", "{model}", "hi", "--lookup", "only", "--exit-layer", "2"], "--exit-layer does nothing with --l"),
        (["generate", "{model}", "hi", "--lookup", "only", "--tree", "2"], "--tree does nothing with --lookup only"),
        (["generate", "{model}", "hi", "--draft-stop", "1.5"], "--draft-stop: '1.5' is not a number from 0 to 1"),
        (["generate", "{model}", "hi", "--tree", "2", "--draft-stop", "0.5"], "--draft-stop is of chains"),
        (["generate", "{model}", "hi", "--tree", "2", "--num-draft-tokens", "5"], "--num-draft-tokens is of chains"),
        (["generate", "{model}", "hi", "--acceptance", "block"], "--acceptance block does nothing at temperature 0"),
        (["generate", "{model}", "hi", "--seed", "4"], "--seed 4 does nothing at temperature 0"),
        (["tune", "{model}", "--seed", "4"], "--seed 4 does nothing at temperature 0"),
        (["chat", "{model}", "--acceptance", "coupled", "--temperature", "1"], "with the same seed: add --seed 0"),
        (["chat", "{model}", "--acceptance", "block", "--temperature", "1", "--tree", "3"], "block judges chains"),
        (["generate", "{model}", "hi", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["generate", "{model}", "hi", "--device", "toaster"], "--device toaster cannot be used here"),
        (["generate", "{model}", "hi", "--exit-layer", "2", "--max-new-tokens", "999"], "the model has 256 positions"),
        (["generate", "{model}", "hi", "--prompt-file", "x"], "both PROMPT and --prompt-file"),
        (["generate", "{model}", "--prompt-file", "{tmp}/x"], "cannot read --prompt-file"),
        (["generate", "{model}", ""], "PROMPT is empty"),
        (["generate", "{model}"], "standard input is empty"),
        (["generate", "nobody/nothing", "hi"], "found no folder nobody/nothing here, and the Hub cannot be reached"),
        (["chat", "{model}", "--system", "Be kind."], "--system 'Be kind.' needs a chat template"),
        (["benchmark", "{model}"], "carries no tuned exit layer to measure: give --exit-layers"),
        (["benchmark", "{model}", "--exit-layers", "2,9"], "exit_layer=9 is out of range"),
        (["benchmark", "{model}", "--exit-layers", "2,x"], "'x' is not a whole number"),
        (["benchmark", "{model}", "--exit-layers", "2", "--max-new-tokens", "250"], "the model has 256 positions"),
        (["benchmark", "{model}", "--exit-layers", "2", "--prompts", "{tmp}/x"], "cannot read prompts from"),
        (["benchmark", "{model}", "--json", "{tmp}/no/x.json"], "there is no folder"),
        (["benchmark", "{model}", "--check", "--dtype", "bfloat16"], "--check compares in float32"),
    ],
)  # fmt: skip
def test_errors_are_one_line_that_names_the_way_out(argv, said, tiny_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    argv = [part.format(model=tiny_checkpoint, tmp=tmp_path) for part in argv]
    code, out, err = run(argv, capsys)
    assert code == 2
    assert said.format(model=tiny_checkpoint) in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""


def test_a_tokenizer_of_another_model_is_refused_before_the_weights_are_read(tiny_checkpoint, capsys):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tiny_checkpoint / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    (tiny_checkpoint / "model.safetensors").unlink()
    code, _, err = run(["generate", str(tiny_checkpoint), "hi"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "the tokenizer has 300 tokens but the model's embeddings only 200" in err


def test_an_exit_layer_out_of_range_is_refused_before_anything_heavy_is_imported(tiny_checkpoint, tmp_path):
    """By the number of layers in config.json, whatever the architecture calls it."""
    gpt2, composite = tmp_path / "gpt2", tmp_path / "composite"
    for folder, config in ((gpt2, {"n_layer": 3}), (composite, {"text_config": {"num_hidden_layers": 3}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    calls = [
        ["generate", str(tiny_checkpoint), "hi", "--exit-layer", "99"],
        ["chat", str(gpt2), "--exit-layer", "3"],
        ["inspect", str(composite), "hi", "--exit-layer", "3"],
        ["benchmark", str(tiny_checkpoint), "--exit-layers", "1,4"],
        ["load", str(tiny_checkpoint), "--exit-layer", "4"],
        ["tune", str(gpt2), "--exit-layers", "1,99"],
        ["evaluate", str(composite), "--exit-layers", "1,99"],
        ["export", str(tiny_checkpoint), "--draft", str(tmp_path / "draft"), "--exit-layer", "99"],
        ["vocabulary", str(tiny_checkpoint), "--text", str(gpt2 / "config.json"), "--size", "9", "--exit-layer", "99"],
    ]
    script = f"""
import sys
from infer.command import main
codes = [main(argv) for argv in {calls!r}]
heavy = {{"torch", "transformers"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0 if set(codes) == {{2}} else str(codes))
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("is out of range: this model has") == len(calls)
    assert result.stderr.count("so choose 1 to 2 (the number") == 4


@pytest.mark.parametrize("content", ['{"model_type": "llama"}', "{", "[]", '{"num_hidden_layers": "many"}'])
def test_a_config_that_does_not_say_its_layers_is_left_to_transformers(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert local_folder(str(tmp_path), [99]) == tmp_path


def test_an_exit_layer_out_of_range_is_refused_before_the_weights_are_read(tiny_checkpoint, capsys):
    (tiny_checkpoint / "model.safetensors").unlink()
    code, _, err = run(["generate", str(tiny_checkpoint), "hi", "--exit-layer", "7"], capsys)
    assert code == 2
    assert "exit_layer=7 is out of range" in err


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused(missing, tiny_checkpoint, capsys):
    (tiny_checkpoint / missing).unlink()
    code, _, err = run(["generate", str(tiny_checkpoint), "hi"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tiny_checkpoint} holds no usable" in err


def test_damaged_weights_are_refused(tiny_checkpoint, capsys):
    (tiny_checkpoint / "model.safetensors").write_bytes(b"not weights")
    code, _, err = run(["generate", str(tiny_checkpoint), "hi"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds no usable causal language model" in err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_shape_that_cannot_be_grown_is_refused_before_the_weights_are_read(command, tiny_checkpoint, capsys):
    (tiny_checkpoint / "model.safetensors").unlink()
    argv = [command, str(tiny_checkpoint), *(["hi"] if command == "generate" else []), "--exit-layer", "2"]
    code, _, err = run([*argv, "--tree", "s4_k1_d9"], capsys)
    assert code == 2
    assert "--tree s4_k1_d9: d is the number of tokens verified, from s (4) to s x k (4)" in err


def test_a_lost_draft_vocabulary_is_refused_before_the_weights_are_read(tiny_checkpoint, tmp_path, capsys):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config["layerskip"] = {"draft_vocabulary": {"size": 32}}
    (tiny_checkpoint / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    argv = [str(tiny_checkpoint), "--text", str(tmp_path / "text.txt"), "--size", "32"]
    assert run(["vocabulary", *argv], capsys)[0] == 0  # which repairs such a checkpoint
    (tiny_checkpoint / "model.safetensors").unlink()
    code, _, err = run(["generate", str(tiny_checkpoint), "hi"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no draft_vocabulary.safetensors beside its weights: copy it there" in err


def test_lost_exit_adapters_are_refused_before_the_weights_are_read(tiny_checkpoint, capsys):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config["layerskip"] = {"adapters": {"rank": 2, "exits": [1]}}
    (tiny_checkpoint / "config.json").write_text(json.dumps(config))
    code, _, err = run(["generate", str(tiny_checkpoint), "hi"], capsys)
    (tiny_checkpoint / "exit_adapters.safetensors").write_bytes(b"nothing")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no exit_adapters.safetensors beside its weights: copy it there" in err
    code, _, err = run(["generate", str(tiny_checkpoint), "hi"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "exit_adapters.safetensors does not hold the adapters that" in err
    (tiny_checkpoint / "exit_adapters.safetensors").unlink()
    (tiny_checkpoint / "model.safetensors").unlink()
    assert "there is no exit_adapters" in run(["generate", str(tiny_checkpoint), "hi"], capsys)[2]


def test_an_unfinished_run_names_its_last_checkpoint(tmp_path, capsys):
    for step in ("step-000100", "step-000200"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "config.json").write_text("{}")
    code, _, err = run(["generate", str(tmp_path), "hi"], capsys)
    assert code == 2
    assert str(tmp_path / "checkpoints" / "step-000200") in err


def test_an_unsupported_model_is_refused_with_the_librarys_reason(tmp_path, capsys):
    from transformers import MambaConfig, MambaForCausalLM

    tokenizer = tiny.tokenizer()
    MambaForCausalLM(
        MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=4, state_size=4)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, _, err = run(["generate", str(tmp_path), "hi", "--exit-layer", "2"], capsys)
    assert code == 2
    assert "cannot be rolled back" in err.splitlines()[-1]


def test_a_checkpoint_that_asks_for_beams_is_refused_with_the_librarys_reason(tiny_checkpoint, capsys):
    path = tiny_checkpoint / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 3}))
    code, _, err = run(["generate", str(tiny_checkpoint), "hi", "--exit-layer", "2", "--max-new-tokens", "8"], capsys)
    assert code == 2
    assert "num_beams=1" in err


def test_a_reader_that_leaves_early_is_no_error(tiny_checkpoint):
    listing = f"{sys.executable} -m infer push {tiny_checkpoint} --repo me/it --dry-run"
    command = f"{listing} | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0"
    assert result.stderr == ""


def test_a_narrow_terminal_cuts_no_number(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = ["self-speculative", "123.4", "1.23", "1.10-1.30"]
    Terminal().table("A title", ["arm", "tokens/s", "speedup", "spread"], [row])
    lines = capsys.readouterr().out.splitlines()
    assert any(all(cell in line for cell in row) for line in lines)
