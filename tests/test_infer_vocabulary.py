"""`vocabulary`: what it shows is counted right, and nothing is written unless asked."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer.command import main
from infer.options import ModelOptions
from infer.vocabulary import always_in, read_pieces, sizes_around
from layerskip.checkpoint.settings import Setting, store_setting
from layerskip.checkpoint.vocabulary import (
    DRAFT_VOCABULARY_FILE,
    count_tokens,
    coverage,
    draft_vocabulary_of,
    most_frequent,
)

TEXT = "def add(a, b):\n    return a + b\n" * 300 + "the quick brown fox jumps over the lazy dog\n" * 100


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def vocabulary(capsys: pytest.CaptureFixture[str], *argv) -> tuple[int, str, str]:
    code = main(["vocabulary", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_and_the_record_show_what_was_counted(tiny_checkpoint, tokenizer, text, capsys):
    before = sorted((path, path.stat().st_mtime_ns) for path in tiny_checkpoint.rglob("*"))
    code, out, err = vocabulary(capsys, tiny_checkpoint, "--text", text, "--size", 32, "--exit-layer", 2)
    assert code == 0
    shown, _, last = out.rstrip("\n").rpartition("\n")
    record = json.loads(last)
    assert [each["size"] for each in record["candidates"]] == [8, 16, 32, 64, 128, 300]
    counts = count_tokens(tokenizer, [TEXT])
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    layer_weights = sum(p.numel() for layer in model.model.layers[:2] for p in layer.parameters())
    for each in record["candidates"]:
        size = each["size"]
        ids = most_frequent(counts, size, tokenizer.all_special_ids)
        assert each["coverage"] == pytest.approx(coverage(counts, ids), abs=1e-3)  # pieces end at lines
        assert each["head_share"] == pytest.approx(size / 300, abs=1e-6)
        assert each["draft_share"] == pytest.approx(size * 32 / (size * 32 + layer_weights), abs=1e-6)
    assert record["candidates"][0]["coverage"] < 1
    assert record["candidates"][-1]["coverage"] == 1
    assert "32 (--size)" in shown
    assert "300 (all)" in shown
    assert f"{record['candidates'][2]['coverage']:.2%}" in shown
    assert "nothing is written" in err
    assert sorted((path, path.stat().st_mtime_ns) for path in tiny_checkpoint.rglob("*")) == before


def test_a_choice_is_judged_on_text_that_it_has_not_seen(tiny_checkpoint, tmp_path, capsys):
    lines = [json.dumps({"text": word * 50}) for word in ("abcdefgh", "stuvwxyz") * 3]
    (tmp_path / "two.jsonl").write_text("\n".join(f"{line}{' ' * i}" for i, line in enumerate(lines)))
    (tmp_path / "one.jsonl").write_text(lines[0])
    two, one = (
        json.loads(
            vocabulary(capsys, tiny_checkpoint, "--text", tmp_path / name, "--size", 24)[1].rstrip().splitlines()[-1]
        )["candidates"]
        for name in ("two.jsonl", "one.jsonl")
    )
    chosen = next(each for each in two if each["size"] == 24)
    assert chosen["coverage"] > 0.95  # of both kinds of text, half of which
    assert chosen["unseen_coverage"] < 0.2  # was hidden for this number
    assert all(each["unseen_coverage"] is None for each in one)
    assert all(each["draft_share"] is None for each in one)  # no exit layer is known


def test_written_it_is_what_the_checkpoint_drafts_with(tiny_checkpoint, tokenizer, text, capsys):
    code, _, err = vocabulary(capsys, tiny_checkpoint, "--text", text, "--size", 40, "--write")
    assert code == 0
    assert str(tiny_checkpoint / DRAFT_VOCABULARY_FILE) in err
    ids = draft_vocabulary_of(AutoModelForCausalLM.from_pretrained(tiny_checkpoint))
    assert len(ids) == 40
    assert set(tokenizer.all_special_ids) <= set(ids.tolist())
    frequent = count_tokens(tokenizer, [TEXT]).topk(10).indices
    assert torch.isin(frequent, ids).all()
    vocabulary(capsys, tiny_checkpoint, "--text", text, "--size", 50, "--write")  # another one takes its place
    assert len(draft_vocabulary_of(AutoModelForCausalLM.from_pretrained(tiny_checkpoint))) == 50


def test_tokens_that_end_the_output_are_always_in(tiny_checkpoint):
    from infer.loading import load

    path = tiny_checkpoint / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 77]}))
    assert always_in(load(ModelOptions(str(tiny_checkpoint)))) == [0, 1, 2, 77]


def test_plain_text_is_read_whole_a_few_lines_at_a_time(text):
    pieces = list(read_pieces(text))
    assert len(pieces) > 2
    assert "".join(pieces) == TEXT
    assert all(piece.endswith("\n") for piece in pieces)


def test_sizes_stay_within_what_is_possible():
    assert sizes_around(8192, 3, 49152) == [2048, 4096, 8192, 16384, 32768, 49152]
    assert sizes_around(8192, 3000, 20000) == [4096, 8192, 16384, 20000]
    assert sizes_around(2, 0, 300) == [1, 2, 4, 8, 300]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{model}", "--text", "{text}"], "--size 8192 is not below the model's vocabulary of 300 tokens"),
        (["{model}", "--text", "{text}", "--size", "2"], "--size=2: need 3 (tokens always in) to 300"),
        (["{model}", "--text", "{tmp}/no.txt", "--size", "32"], "cannot read --text {tmp}/no.txt: No such file"),
        (["{model}", "--text", "{tmp}/no.jsonl", "--size", "32"], "cannot read prompts from {tmp}/no.jsonl"),
        (["{model}", "--text", "{tmp}/empty.txt", "--size", "32"], "empty.txt is empty: give text"),
        (["{model}", "--text", "{text}", "--size", "32", "--exit-layer", "9"], "exit_layer=9 is out of range"),
        (["nobody/nothing", "--text", "{text}", "--write"], "--write needs a folder, and nobody/nothing is on the Hub"),
        (["{tmp}/nowhere", "--text", "{text}"], "does not exist"),
    ],
)
def test_errors_are_one_line_that_names_the_way_out(argv, said, tiny_checkpoint, text, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    names = {"model": tiny_checkpoint, "text": text, "tmp": tmp_path}
    code, out, err = vocabulary(capsys, *(part.format(**names) for part in argv))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.format(**names) in err
    assert not (tiny_checkpoint / DRAFT_VOCABULARY_FILE).exists()


def test_a_head_that_cannot_be_cut_is_refused_with_the_librarys_reason(tiny_checkpoint, text, capsys, monkeypatch):
    monkeypatch.setattr("transformers.LlamaForCausalLM.get_output_embeddings", lambda model: None)
    code, _, err = vocabulary(capsys, tiny_checkpoint, "--text", text, "--size", 32)
    assert (code, err.count("\n")) == (2, 1)
    assert "LlamaForCausalLM has no output embeddings" in err


def test_a_checkpoint_tuned_to_auto_has_the_heads_share_of_one_of_its_exits(tiny_checkpoint, text, capsys):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting("auto", "auto"))
    model.save_pretrained(tiny_checkpoint)
    _, out, _ = vocabulary(capsys, tiny_checkpoint, "--text", text, "--size", 32)
    assert all(0 < each["draft_share"] < 1 for each in json.loads(out.splitlines()[-1])["candidates"])
