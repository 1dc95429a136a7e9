"""`generate` with a grammar: its text alone is printed, and what is wrong with it is told before a model is loaded."""

import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from infer.command import main
from layerskip.grammar.processor import Grammar
from tests import programs

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["fox", "dog"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
LARK = 'start: WORD (" " WORD){2}\nWORD: /[a-z]{1,5}/\n'


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    return programs.run(["generate", "--max-new-tokens", "99", *argv], capsys)


def check(flag: str, text: str) -> None:
    if flag == "--json-schema":
        value = json.loads(text)
        assert list(value) == ["n", "kind"]
        assert 1 <= value["n"] <= 99
        assert value["kind"] in ("fox", "dog")
    else:
        assert re.fullmatch({"--regex": "(yes|no)[.!]", "--lark": "[a-z]{1,5}( [a-z]{1,5}){2}"}[flag], text)


@pytest.mark.parametrize("how", [(), ("--temperature", "2", "--seed", "3")])
@pytest.mark.parametrize("flag", ["--json-schema", "--regex", "--lark"])
def test_what_is_printed_is_a_text_of_the_grammar(flag, how, tiny_checkpoint, tmp_path, capsys):
    file = tmp_path / "grammar"
    file.write_text(json.dumps(SCHEMA) if flag == "--json-schema" else LARK)
    given = "(yes|no)[.!]" if flag == "--regex" else str(file)
    code, out, _ = run(capsys, str(tiny_checkpoint), "def add(a", flag, given, "--exit-layer", "2", *how)
    assert code == 0
    check(flag, out.removesuffix("\n"))


def test_greedy_output_is_plain_constrained_decodings(tiny_checkpoint, capsys):
    model, tokenizer = (kind.from_pretrained(tiny_checkpoint) for kind in (AutoModelForCausalLM, AutoTokenizer))
    inputs = tokenizer("def add(a", return_tensors="pt")
    length = inputs.input_ids.shape[1]
    processor = Grammar.from_json_schema(SCHEMA, tokenizer).processor(length)
    output = model.eval().generate(**inputs, do_sample=False, max_new_tokens=99, logits_processor=[processor])
    expected = tokenizer.decode(output[0, length:], skip_special_tokens=True)
    flags = ("--json-schema", json.dumps(SCHEMA), "--exit-layer", "3")
    _, out, _ = run(capsys, str(tiny_checkpoint), "def add(a", *flags)
    assert out == expected + "\n"


def test_output_cut_short_is_told_and_fails(tiny_checkpoint, capsys):
    flags = ("--regex", "a{20}", "--exit-layer", "2", "--max-new-tokens")
    code, out, err = run(capsys, str(tiny_checkpoint), "def", *flags, "5")
    assert (code, out) == (1, "aaaaa\n")
    assert "ended before it was complete: raise --max-new-tokens" in err
    code, out, err = run(capsys, str(tiny_checkpoint), "def", *flags, "20")  # complete, though without its end
    assert (code, out) == (0, "a" * 20 + "\n")
    assert "complete" not in err
    code, out, err = run(capsys, str(tiny_checkpoint), "def", *flags, "50", "--stop", "aaa")
    assert (code, out) == (1, "aaa\n")
    assert "ended before it was complete: --stop ended it, leave that out" in err


def test_a_model_that_ends_otherwise_than_its_tokenizer(tiny_checkpoint, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    for ends in ([7, 2], 7, [7, 5000]):
        model.generation_config.eos_token_id = ends
        model.save_pretrained(tiny_checkpoint)
        code, _, err = run(capsys, str(tiny_checkpoint), "def", "--regex", "a{3}", "--exit-layer", "2")
        assert code == 0
        assert err.splitlines()[-1].startswith("4 tokens")  # three letters and an end


def test_every_answer_of_a_chat_is_a_text_of_the_grammar(tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def\nthe quick\n"))
    flags = ("--exit-layer", "2", "--json-schema", json.dumps(SCHEMA), "--max-new-tokens", "60")
    assert main(["chat", str(tiny_checkpoint), *flags]) == 0
    first, second = capsys.readouterr().out.splitlines()
    check("--json-schema", first)
    check("--json-schema", second)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--regex", "a", "--lark", "x"), "--lark: not allowed with argument --regex"),
        (("--regex", "(a"), "the regex '(a' cannot be used: unclosed group at character 1"),
        (("--json-schema", '{"type": "bogus"}'), "Invalid type: bogus (at #)"),
        (("--json-schema", '{"type":'), "the JSON schema is no JSON: Expecting value at line 1, column 9"),
        (("--json-schema", "nowhere.json"), "cannot read --json-schema nowhere.json: No such file"),
        (("--lark", "nowhere.lark"), "cannot read --lark nowhere.lark: No such file"),
        (("--lark", "{tmp}/bad.lark"), 'unknown name: "foo" (line 1, column 8)'),
        (("--lark", "{tmp}/bytes.lark"), "bytes.lark is not UTF-8 text (byte 1): convert it"),
    ],
)
def test_what_is_wrong_is_one_line_before_the_model_is_loaded(flags, said, tmp_path, capsys):
    (tmp_path / "bad.lark").write_text("start: foo")
    (tmp_path / "bytes.lark").write_bytes(b"a\xff")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("no model at all")
    code, out, err = run(capsys, str(model), "def", *(flag.replace("{tmp}", str(tmp_path)) for flag in flags))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_without_llguidance_the_way_out_is_named(tiny_checkpoint, monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    from layerskip.grammar import definition as grammar_definition

    real = importlib.import_module
    monkeypatch.setattr(
        grammar_definition.importlib,
        "import_module",
        lambda name, *rest: missing(name) if name == "llguidance" else real(name, *rest),
    )
    code, _, err = run(capsys, str(tiny_checkpoint), "def", "--regex", "a")
    assert code == 2
    assert "pip install 'layerskip-kit[grammar]'" in err


def test_a_wrong_grammar_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    script = f"""
import sys
from infer.command import main
code = main(["generate", {str(tmp_path)!r}, "hi", "--regex", "(a"])
sys.exit(code != 2 or "torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True, check=True)
