"""`generate --prompts`: every prompt of a file is continued as it is alone, in order, whatever the batch size."""

import io
import json
import sys

import pytest

from infer.command import main
from infer.prompt_file import read_every_prompt
from tests.test_infer_generate import reference

PROMPTS = ["def add(a", "the quick brown fox jumps", "lazy", "def add(a", "return a + b"]
SAMPLE = ("--temperature", "1.2", "--seed", "5")


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


def batches(folder, file, capsys, *flags: str, code: int = 0) -> tuple[list[dict], str]:
    argv = ["generate", str(folder), "--prompts", str(file), "--max-new-tokens", "40", "--exit-layer", "2", *flags]
    assert main(argv) == code
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


@pytest.mark.parametrize("flags", [(), ("--tree", "3,2,1"), ("--lookup", "hybrid"), ("--draft-stop", "0.3")])
def test_every_prompt_is_continued_as_it_is_alone_and_in_order(flags, tiny_checkpoint, prompt_file, capsys):
    records, _ = batches(tiny_checkpoint, prompt_file, capsys, "--batch-size", "3", *flags)
    assert [record["prompt"] for record in records] == PROMPTS
    assert [record["text"] for record in records] == [reference(tiny_checkpoint, prompt) for prompt in PROMPTS]


def test_statistics_are_those_of_each_row(tiny_checkpoint, prompt_file, capsys):
    records, err = batches(tiny_checkpoint, prompt_file, capsys, "--verbose")
    alone = []
    for prompt in PROMPTS:
        prompt_file.write_text(prompt)
        alone += batches(tiny_checkpoint, prompt_file, capsys)[0]
    for record, single in zip(records, alone, strict=True):
        # Near its end a row is drafted for as far as the others, so there its drafts may be more than alone.
        assert record.pop("draft_acceptance_rate") <= single.pop("draft_acceptance_rate")
        assert record == single
        assert record["mean_acceptance_length"] == pytest.approx(record["tokens"] / record["verify_steps"], abs=1e-4)
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines[:5]] == ["1", "2", "3", "4", "5"]
    total = sum(record["tokens"] for record in records)
    assert lines[5].startswith(f"5 prompts, 5 together: {total} tokens in ")


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_a_seed_repeats_a_sample(acceptance, tiny_checkpoint, prompt_file, capsys):
    flags = (*SAMPLE, "--acceptance", acceptance)
    first, again, alone = (
        [record["text"] for record in batches(tiny_checkpoint, prompt_file, capsys, *flags, "--batch-size", size)[0]]
        for size in "221"
    )
    assert first == again
    assert first[0] != first[3]  # the same prompt, with noise of its own
    if acceptance == "coupled":
        assert first == alone
    else:  # the drafts of a row's last round, and so what it is given of its noise, depend on the other rows
        assert [text[:20] for text in first] == [text[:20] for text in alone]


def test_coupled_samples_are_those_of_plain_decoding(tiny_checkpoint, prompt_file, capsys):
    flags = (*SAMPLE, "--acceptance", "coupled")
    drafted, _ = batches(tiny_checkpoint, prompt_file, capsys, *flags, "--tree", "s3_k2_d5")
    plain, _ = batches(tiny_checkpoint, prompt_file, capsys, *flags, "--exit-layer", "none")
    assert [record["text"] for record in drafted] == [record["text"] for record in plain]
    assert all(record["verify_steps"] == record["tokens"] for record in plain)


def test_stop_strings_end_rows_one_by_one(tiny_checkpoint, prompt_file, capsys):
    whole = reference(tiny_checkpoint)
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole[i : i + 2].isascii())
    records, _ = batches(tiny_checkpoint, prompt_file, capsys, "--stop", stop)
    texts = [reference(tiny_checkpoint, prompt, stop_strings=[stop]) for prompt in PROMPTS]
    assert [record["text"] for record in records] == texts


def test_a_grammar_holds_in_every_row_and_an_unfinished_one_is_told(tiny_checkpoint, prompt_file, capsys):
    records, _ = batches(tiny_checkpoint, prompt_file, capsys, "--regex", "[ab]{3}", *SAMPLE)
    assert all(len(record["text"]) == 3 and set(record["text"]) <= {"a", "b"} for record in records)
    _, err = batches(tiny_checkpoint, prompt_file, capsys, "--regex", "[ab]{99}", code=1)
    assert err.count("the output ended before it was complete") == len(PROMPTS)


def test_records_and_lines(tmp_path):
    lines = tmp_path / "x.txt"
    lines.write_text("a\n\n  b \na\n")
    assert read_every_prompt(lines) == ("a", "  b ", "a")
    records = tmp_path / "x.jsonl"
    records.write_text('{"prompt": "a\\nb"}\n\n{"text": "c\u2028d"}\n')
    assert read_every_prompt(records) == ("a\nb", "c\u2028d")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("hi", "--prompts", "{file}"), "both PROMPT and --prompts"),
        (("--prompt-file", "x", "--prompts", "{file}"), "both --prompt-file and --prompts"),
        (("hi", "--batch-size", "3"), "--batch-size 3 goes with --prompts FILE"),
        (("--prompts", "{file}", "--color"), "--color shows how one text"),
        (("--prompts", "{file}.none"), "cannot read prompts from"),
        (("--prompts", "{empty}"), "holds no prompts: write one a line"),
        (("--prompts", "{blank}"), "prompt 2 of"),
        (("--prompts", "{file}", "--max-new-tokens", "254"), "prompt 1: the prompt has"),
    ],
)
def test_what_does_not_go_together_is_told(flags, said, tiny_checkpoint, prompt_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "blank.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    paths = {"file": prompt_file, "empty": tmp_path / "empty", "blank": tmp_path / "blank.jsonl"}
    argv = [flag.format(**paths) for flag in flags]
    assert main(["generate", str(tiny_checkpoint), *argv, "--exit-layer", "2"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
