"""`generate`: what is streamed is what the model says, however it is drafted, coloured or stopped."""

import io
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infer.command import main
from infer.generate import read_prompt
from infer.loading import Loaded
from infer.options import DecodingOptions, ModelOptions
from infer.streaming import Span, Splitter, stream
from infer.terminal import Terminal
from layerskip import Piece, Step
from layerskip.checkpoint.resolving import resolve_setting
from layerskip.checkpoint.settings import Setting, store_setting
from tests import tiny

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def generate(folder, capsys, *flags: str, prompt: str = "def add(a") -> tuple[str, str]:
    assert main(["generate", str(folder), prompt, "--max-new-tokens", "40", *flags]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def reference(folder, prompt: str = "def add(a", **arguments) -> str:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False, tokenizer=tokenizer, **arguments)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def make_step(tokens: list[int], num_accepted: int) -> Step:
    return Step(torch.tensor([tokens]), len(tokens), num_accepted, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("flags", [(), ("--exit-layer", "1"), ("--exit-layer", "3", "--num-draft-tokens", "7")])
def test_the_stream_joined_is_the_decoded_output_of_plain_generate(flags, tiny_checkpoint, capsys):
    out, _ = generate(tiny_checkpoint, capsys, *flags)
    assert out == reference(tiny_checkpoint) + "\n"


def test_colours_add_nothing_to_the_text(tiny_checkpoint, capsys):
    plain, _ = generate(tiny_checkpoint, capsys, "--exit-layer", "2")
    colored, legend = generate(tiny_checkpoint, capsys, "--exit-layer", "2", "--color")
    assert ANSI.search(colored)
    assert ANSI.sub("", colored) == plain
    assert "drafted and accepted" in ANSI.sub("", legend)


def test_the_last_line_says_how_it_went(tiny_checkpoint, capsys):
    _, err = generate(tiny_checkpoint, capsys, "--exit-layer", "2", "--num-draft-tokens", "3", "--verbose")
    speed, details = err.splitlines()
    number = r"\d+\.\d+"
    assert re.fullmatch(
        rf"\d+ tokens in {number} s, {number} tokens/s, "
        rf"mean_acceptance_length {number}, draft_acceptance_rate {number}",
        speed,
    )
    assert re.search(rf"acceptance by position {number} {number} {number}$", details)


def test_what_the_checkpoint_is_tuned_to_is_used_and_its_absence_is_told(tiny_checkpoint, capsys):
    _, err = generate(tiny_checkpoint, capsys)
    assert "carries no tuned exit layer" in err
    assert "plain decoding" in err
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting(2, 3))
    model.save_pretrained(tiny_checkpoint)
    _, err = generate(tiny_checkpoint, capsys, "--verbose")
    assert "no tuned exit layer" not in err
    assert len(re.search(r"by position ([\d. ]+)$", err)[1].split()) == 3


def test_exit_layer_none_is_plain_decoding_whatever_the_checkpoint_says(tiny_checkpoint, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting(2, 3))
    model.save_pretrained(tiny_checkpoint)
    _, err = generate(tiny_checkpoint, capsys, "--exit-layer", "none")
    assert "plain decoding" in err


def test_an_exit_layer_drafts_where_the_checkpoint_is_tuned_to_off(tiny_checkpoint, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting(None, 0))
    model.save_pretrained(tiny_checkpoint)
    assert resolve_setting(model) == Setting(None, 0)
    assert resolve_setting(model, exit_layer=2) == Setting(2, 4)
    assert resolve_setting(model, exit_layer=2, num_draft_tokens=3, tree="s2_k2_d3").tree == "s2_k2_d3"
    _, err = generate(tiny_checkpoint, capsys, "--exit-layer", "2")
    assert "draft_acceptance_rate" in err
    for flags in (("--tree", "2,1"), ("--num-draft-tokens", "3"), ("--draft-stop", "0.4")):
        assert main(["generate", str(tiny_checkpoint), "def", *flags]) == 2
        assert f"{flags[0]} goes with an early exit" in capsys.readouterr().err


@pytest.mark.parametrize(("tuned", "flags", "reason", "instead"), [
    ((2, 4, "s3_k2_d6"), "--draft-stop 0.3", "tuned to --tree s3_k2_d6", "--num-draft-tokens 4"),
    (("auto", "auto"), "--draft-stop 0.3", "tuned to --exit-layer auto and --num-draft-tokens auto",
     "--exit-layer 1 … 3 and --num-draft-tokens 4"),
    (("auto", "auto"), "--draft-stop 0.3 --num-draft-tokens 3", "tuned to --exit-layer auto:", "--exit-layer 1 … 3"),
    (("auto", "auto"), "--tree 2,1", "tuned to --exit-layer auto:", "--exit-layer 1 … 3"),
    ((2, "auto"), "--lookup branch", "tuned to --num-draft-tokens auto", "--num-draft-tokens 4"),
    ((2, 4, None, "branch"), "--num-draft-tokens auto", "tuned to --lookup branch", "--lookup hybrid"),
    ((None, 0, None, "only"), "--lookup hybrid", "tuned to --exit-layer none", "--exit-layer 1 … 3"),
    ((2, 4, "s3_k2_d6"), "--acceptance block --temperature 1", "tuned to --tree s3_k2_d6", "--num-draft-tokens 4"),
])  # fmt: skip
def test_what_does_not_go_with_the_tuned_setting_is_told_and_so_is_how_to_override_it(
    tuned, flags, reason, instead, tiny_checkpoint, capsys
):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting(*tuned))
    model.save_pretrained(tiny_checkpoint)
    assert main(["generate", str(tiny_checkpoint), "def", *flags.split()]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert f"give {instead} to override it" in err
    assert "leave" not in err  # of two that were not both given
    flags = f"{flags} {instead.replace(' … 3', '').replace(' and', '')}"
    assert main(["generate", str(tiny_checkpoint), "def", "--max-new-tokens", "4", *flags.split()]) == 0


@pytest.mark.parametrize("lookup", ["only", "off"])
def test_an_exit_that_is_asked_for_takes_a_tuned_lookups_place(lookup):
    model = tiny.llama()
    store_setting(model, Setting(None, 0, lookup=lookup))
    assert resolve_setting(model, exit_layer=2) == Setting(2, 4)
    assert resolve_setting(model, exit_layer=2, lookup="hybrid") == Setting(2, 4, lookup="hybrid")


def test_output_ends_at_a_stop_string(tiny_checkpoint, capsys):
    whole = reference(tiny_checkpoint)
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole[i : i + 2].isascii())
    out, _ = generate(tiny_checkpoint, capsys, "--exit-layer", "2", "--stop", "unlikely", "--stop", stop)
    assert out == reference(tiny_checkpoint, stop_strings=[stop]) + "\n"
    assert len(out) < len(whole)


def test_a_seed_repeats_a_sample(tiny_checkpoint, capsys):
    flags = ("--exit-layer", "2", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.99")
    first, again, other = (generate(tiny_checkpoint, capsys, *flags, "--seed", seed)[0] for seed in "770")
    assert first == again
    assert first != other


def test_sampling_flags_leave_nothing_to_the_checkpoint():
    assert DecodingOptions(temperature=0.7).generate_arguments() == {
        "max_new_tokens": 256,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
    }


def test_prompts_come_from_where_they_are_and_lose_one_newline(tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("a\n\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("b\n"))
    assert read_prompt(None, str(tmp_path / "prompt.txt")) == "a\n"
    assert read_prompt(None, None) == "b"
    assert read_prompt("c\n", None) == "c\n"


def test_spans_tell_drafted_text_from_the_models_own():
    tokenizer = tiny.tokenizer()
    splitter = Splitter(Loaded("tiny", tiny.llama(), tokenizer))
    tokens = tokenizer("lazy dogs")["input_ids"]
    drafted, own = (tokenizer.decode(part) for part in (tokens[:-1], tokens[-1:]))
    assert splitter.split(Piece(drafted + own, make_step(tokens, len(tokens) - 1))) == [
        Span(drafted, drafted=True),
        Span(own, drafted=False),
    ]


def test_a_character_belongs_to_the_token_that_completes_it():
    tokenizer = tiny.tokenizer()
    splitter = Splitter(Loaded("tiny", tiny.llama(), tokenizer))
    first, second = tokenizer("é")["input_ids"]  # its two bytes
    assert splitter.split(Piece("é", make_step([first, second], 1))) == [Span("é", drafted=False)]
    assert splitter.split(Piece("", make_step([first], 0))) == []
    assert splitter.split(Piece("é", make_step([second, first], 1))) == [Span("é", drafted=True)]


def test_spans_joined_are_the_stream(tiny_llama):
    tokenizer = tiny.tokenizer()
    loaded = Loaded("tiny", tiny.llama(vocab_size=len(tokenizer)), tokenizer)
    splitter = Splitter(loaded)
    options = DecodingOptions(max_new_tokens=60)
    for piece in stream(loaded, tokenizer("def add")["input_ids"], Setting(3, 4), options):
        spans = splitter.split(piece)
        assert "".join(span.text for span in spans) == piece.text
        assert [span.drafted for span in spans] in ([], [True], [False], [True, False])


def test_coloured_text_is_not_wrapped_or_expanded(capsys):
    text = "a\tb " * 100 + "[bold]x[/bold]"
    Terminal(color=True).write(text, drafted=True)
    assert ANSI.sub("", capsys.readouterr().out) == text


def test_checkpoints_load_in_the_dtype_asked_for(tiny_checkpoint):
    from infer.loading import load

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).to(torch.bfloat16)
    model.save_pretrained(tiny_checkpoint)
    assert load(ModelOptions(str(tiny_checkpoint), dtype="bfloat16")).model.dtype == torch.bfloat16
    assert load(ModelOptions(str(tiny_checkpoint), dtype="float32")).model.dtype == torch.float32


@pytest.mark.parametrize(
    "flags",
    [
        ("--exit-layer", "2", "--tree", "3,2,1"),
        ("--exit-layer", "2", "--tree", "s3_k2_d5"),
        ("--exit-layer", "2", "--lookup", "hybrid"),
        ("--exit-layer", "2", "--lookup", "branch"),
        ("--lookup", "only"),
        ("--exit-layer", "2", "--draft-stop", "0.3"),
        ("--exit-layer", "2", "--draft-stop", "cost"),
    ],
)
def test_however_it_is_drafted_the_text_is_the_same(flags, tiny_checkpoint, capsys, monkeypatch):
    from infer import streaming

    seen: list[Setting] = []
    original = streaming.stream
    monkeypatch.setattr(streaming, "stream", lambda *args: (seen.append(args[2]), original(*args))[1])
    out, _ = generate(tiny_checkpoint, capsys, *flags)
    assert out == reference(tiny_checkpoint) + "\n"
    given = {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    expected = {"exit_layer": None, "tree": None, "lookup": "off", "draft_stop": None} | given
    shown = {name: getattr(seen[0], name) for name in expected}
    tree = shown["tree"]
    shown["tree"] = ",".join(map(str, tree)) if isinstance(tree, tuple) else tree
    assert {name: None if value is None else str(value) for name, value in shown.items()} == expected


def test_coupled_samples_are_those_of_plain_decoding_with_the_seed(tiny_checkpoint, capsys):
    flags = ("--temperature", "1.3", "--acceptance", "coupled", "--seed", "3")
    plain, _ = generate(tiny_checkpoint, capsys, *flags, "--exit-layer", "none")
    for drafting in (("--exit-layer", "2"), ("--exit-layer", "3", "--tree", "3,2,1"), ("--lookup", "only")):
        assert generate(tiny_checkpoint, capsys, *flags, *drafting)[0] == plain


def test_the_draft_vocabulary_may_be_left_out(tiny_checkpoint, capsys):
    from layerskip.checkpoint.vocabulary import store_draft_vocabulary

    store_draft_vocabulary(tiny_checkpoint, torch.arange(3, 7))
    flags = ("--exit-layer", "3", "--verbose")
    cut, cut_err = generate(tiny_checkpoint, capsys, *flags)
    whole, whole_err = generate(tiny_checkpoint, capsys, *flags, "--no-draft-vocabulary")
    assert cut == whole
    lengths = [float(re.search(r"mean_acceptance_length (\d\.\d+)", err)[1]) for err in (cut_err, whole_err)]
    assert lengths[0] < lengths[1]  # four tokens out of three hundred are seldom right
