"""Text to blocks: held out by whole sources, packed without loss, in an order that is a pure function."""

import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runs import TINY
from train.bad_rows import BadRows
from train.blocks import Blocks, Mixture, position_ids
from train.chat import Encoded
from train.command import load_config
from train.corpus import read_documents
from train.data import prepare_data
from train.errors import ConfigError, TrainingError
from train.order import allot, block_index, micro_batches
from train.packing import START, TARGET, BestFit, encode, encode_documents, token_dtype, write_tokens
from train.prompts import PROMPT_TOKENS, choose_prompts
from train.splits import SPLITS, Document, Groups, hash_share, put_on_sides, split_of
from train.text_config import DataConfig, SourceConfig
from train.vocabulary import END_OF_TEXT, train_tokenizer

WORDS = ["def", "return", "class", "value", "index", "self", "import", "raise", "yield", "lambda"]


def documents(count: int, seed: int = 0) -> list[Document]:
    """Texts of 40 to 200 words, three to a group, a fifth of them held out for each purpose."""
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, random.integers(40, 200))) for _ in range(count)]
    groups = [f"group{i // 3}" for i in range(count)]
    return [
        Document(f"{i} {t}", f"file{i}", g, split_of(g, 0.2))
        for i, (t, g) in enumerate(zip(texts, groups, strict=True))
    ]


def read(data: SourceConfig, held_out: float = 0.05, limit: int = 0) -> list[Document]:
    return list(read_documents(data, held_out, BadRows(limit)))


# Splits


def test_siblings_never_sit_on_two_sides():
    data = DataConfig(standard_library=True)
    sides: dict[str, set[str]] = {}
    for document in read(data):
        sides.setdefault(document.group, set()).add(document.split)
        assert document.name.split("/")[0].removesuffix(".py") == document.group
    assert all(len(splits) == 1 for splits in sides.values())
    assert set().union(*sides.values()) == set(SPLITS)


def test_standard_library_leaves_out_its_tests_and_what_is_installed():
    names = [document.name for document in read(DataConfig(standard_library=True))]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages", "idlelib"} & set(n.split("/"))]


def test_a_limited_library_is_a_few_of_everything():
    chosen = read(DataConfig(standard_library=True, max_documents=60), held_out=0.15)
    assert len(chosen) == 60
    assert len({document.group for document in chosen}) > 10
    assert {document.split for document in chosen} == set(SPLITS)


def test_split_shares_are_those_asked_for_and_stable():
    counts = Counter(split_of(f"group {i}", 0.05) for i in range(20_000))
    for split in ("validation", "test"):
        assert counts[split] / 20_000 == pytest.approx(0.05, abs=0.006)  # four standard deviations
    assert hash_share("asyncio") == 0.5575211824212526  # a run elsewhere, or tomorrow, holds out the same


def test_more_held_out_moves_no_group_back_to_training():
    groups = [f"group {i}" for i in range(2000)]
    held = {share: {g for g in groups if split_of(g, share) != "train"} for share in (0.05, 0.1, 0.2)}
    assert held[0.05] < held[0.1] < held[0.2]


@pytest.mark.parametrize("held_out", [0.001, 0.05, 0.4])
@pytest.mark.parametrize("count", [3, 4, 7])
def test_a_handful_of_documents_has_text_in_each_split(tmp_path, count, held_out):
    moved_somewhere = False
    for first in range(0, 40 * count, count):
        groups, found = Groups(enough=2), [Document("text", f"{i}", f"{i}") for i in range(first, first + count)]
        placed = list(put_on_sides(iter(found), held_out, SPLITS, {}))
        for document in placed:
            groups.add(document, 2)
        moved = groups.moves()
        again = list(put_on_sides(iter(found), held_out, SPLITS, moved))
        assert {document.split for document in again} == set(SPLITS)
        empty = set(SPLITS) - {document.split for document in placed}
        assert set(moved.values()) == empty  # nothing is moved but into an empty split
        assert sum(a.split != b.split for a, b in zip(placed, again, strict=True)) == len(empty)
        moved_somewhere |= bool(moved)
    assert moved_somewhere


def test_what_fills_an_empty_split_depends_on_the_groups_alone_and_fills_a_block():
    lengths = {"a": 1, "b": 50, "c": 40, "d": 60}

    def moves(names: str) -> dict[float, str]:
        groups = Groups(enough=32)
        for name in names:
            groups.add(Document("text", name, name, "train", may_be=SPLITS), lengths[name])
        return groups.moves()

    long = sorted(hash_share(name) for name in "bcd")
    assert moves("abcd") == moves("dcba") == {long[0]: "validation", long[1]: "test"}
    assert moves("ab") == {}  # two groups cannot be three splits


def test_text_that_was_named_as_held_out_is_never_trained_on(tmp_path):
    groups = Groups(enough=1)
    for name in ("a", "b"):
        groups.add(Document("text", name, name, "train", may_be=("train",)), 9)
        groups.add(Document("text", f"eval {name}", f"eval {name}", "test", may_be=("validation", "test")), 9)
    [(share, split)] = groups.moves().items()
    assert split == "validation"
    assert share in (hash_share("eval a"), hash_share("eval b"))


# Sources


def test_local_files_are_read_once_each(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "lines.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n{"body": "  "}\n')
    paths = (f"{tmp_path}/*.*", f"{tmp_path}/**/*.py", f"{tmp_path}/b.txt")
    texts = [d.text for d in read(DataConfig(path=paths, text_column="body"))]
    assert sorted(texts) == ["one", "text of a.md", "text of b.txt", "text of sub/c.py", "two"]


def test_equal_lines_are_one_group(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "same"}\n{"text": "other"}\n{"text": "same"}\n')
    first, second, third = read(DataConfig(path=(f"{tmp_path}/lines.jsonl",)))
    assert first.group == third.group != second.group
    assert len({first.name, second.name, third.name}) == 3


def test_sources_that_cannot_be_read(tmp_path):
    def message(**settings) -> str:
        with pytest.raises(TrainingError) as caught:
            read(DataConfig(**settings))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no file matches" in message(path=(f"{tmp_path}/absent/*.txt",))
    (tmp_path / "empty.txt").write_text(" \n")
    assert "the data set is empty" in message(path=(f"{tmp_path}/empty.txt",))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "cannot read" in message(path=(f"{tmp_path}/picture.png",))
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    assert "is not UTF-8 (byte 1)" in message(path=(f"{tmp_path}/latin.txt",))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    assert "bad.jsonl:2 has no 'text'; unusable rows of this source so far: 1, data.max_bad_rows is 0" in message(
        path=(f"{tmp_path}/bad.jsonl",)
    )
    (tmp_path / "wrong.jsonl").write_text('{"body": "b", "title": "c"}\n')
    found = message(path=(f"{tmp_path}/wrong.jsonl",))
    assert found == f"data.text_column is 'text'; {tmp_path}/wrong.jsonl has body, title"


def test_local_dataset_through_datasets(tmp_path):
    rows = [{"content": f"document {i}"} for i in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(dataset=str(tmp_path), text_column="content", max_documents=4)
    assert [d.text for d in read(data)] == [row["content"] for row in rows[:4]]
    with pytest.raises(TrainingError, match=r"data.text_column is 'text'; .* has content"):
        read(DataConfig(dataset=str(tmp_path)))
    with pytest.raises(TrainingError, match="cannot load"):
        read(DataConfig(dataset=str(tmp_path / "absent")))


# Tokens and blocks


def test_trained_tokenizer_loses_no_byte_and_knows_its_end():
    tokenizer = train_tokenizer((d.text for d in documents(30)), 300)
    assert len(tokenizer) <= 300
    text = "def größe(): return '→ 日'\n\n\ttab"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT


def test_packing_loses_nothing(tmp_path, tokenizer):
    corpus = documents(90)
    encoded = encode_documents(corpus, tokenizer, None, BadRows(0))
    counts, num_cut, num_lost = write_tokens(encoded, token_dtype(len(tokenizer)), tmp_path)
    assert num_cut == num_lost == 0
    for split in SPLITS:
        expected = [
            token
            for document in corpus
            if document.split == split
            for token in [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
        ]
        assert counts[split] == len(expected) > 0
        blocks = Blocks(tmp_path / f"{split}.bin", token_dtype(len(tokenizer)), 32)
        rows = blocks.rows(range(len(blocks)))
        packed = rows.input_ids.flatten().tolist()
        assert packed == expected[: len(packed)]
        assert (rows.labels == rows.input_ids).all()
        assert rows.position_ids is None
        assert len(expected) - len(packed) < 32  # only the tail shorter than a block


def test_a_document_that_ends_with_end_of_text_gets_no_second_one(tokenizer):
    first, second = encode(["a", "a" + tokenizer.eos_token], tokenizer)
    assert first == second


def test_ids_need_the_type_that_holds_them():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_text_shorter_than_a_block_is_an_error(tmp_path):
    (tmp_path / "validation.bin").write_bytes(np.arange(40, dtype=np.uint16).tobytes())
    with pytest.raises(TrainingError, match=r"the validation text has 40 tokens, data\.sequence_length is 64"):
        Blocks(tmp_path / "validation.bin", np.dtype(np.uint16), 64)


def test_evaluation_reads_the_same_blocks_spread_over_the_split(tmp_path):
    (tmp_path / "test.bin").write_bytes(np.arange(100 * 32, dtype=np.uint16).tobytes())
    blocks = Mixture([Blocks(tmp_path / "test.bin", np.dtype(np.uint16), 32)], [1.0])
    batches = [batch.input_ids for batch in blocks.batches(batch_size=4, num_blocks=10)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert (torch.cat(batches)[:, 0] // 32).tolist() == list(range(0, 100, 10))
    assert sum(len(batch.labels) for batch in blocks.batches(4, 1000)) == 100  # all, if there are fewer


# Order


def test_every_epoch_reads_every_block_once_in_another_order():
    epochs = [[block_index(7, epoch * 50 + i, 50) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [block_index(8, i, 50) for i in range(50)] != epochs[0]  # another seed


def test_order_is_a_pure_function_of_seed_and_position():
    forwards = [block_index(3, i, 17) for i in range(200)]
    backwards = [block_index(3, i, 17) for i in reversed(range(200))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2)])
def test_a_step_reads_the_same_rows_however_it_is_shared_out(processes, micro):
    rows = [i for rank in range(processes) for part in micro_batches(5, 8, micro, rank, processes) for i in part]
    assert sorted(rows) == list(range(40, 48))


def test_processes_lie_side_by_side_in_a_micro_step():
    first, second = micro_batches(0, 8, 2, 0, 2), micro_batches(0, 8, 2, 1, 2)
    assert first == [range(2), range(4, 6)]
    assert second == [range(2, 4), range(6, 8)]


# Prompts


def test_prompts_take_every_document_before_a_second_part_of_one(tokenizer):
    part = "word " * 40
    corpus = [Document(f"{i} {part}\n\nsecond {i} {part}\n\nthird {i} {part}", f"f{i}", "g") for i in range(6)]
    prompts = choose_prompts(corpus, tokenizer, count=8)
    assert sorted(prompt.split()[0] for prompt in prompts[:6]) == list("012345")
    assert all(prompt.startswith("second ") for prompt in prompts[6:])


def test_prompts_are_beginnings_of_about_the_right_length(tokenizer):
    corpus = documents(40)
    prompts = choose_prompts(corpus, tokenizer)
    assert len(prompts) == len(set(prompts)) == 24
    for prompt in prompts:
        assert any(document.text.startswith(prompt) for document in corpus)
        assert len(tokenizer(prompt)["input_ids"]) <= PROMPT_TOKENS


def test_a_prompt_does_not_end_inside_a_character(tokenizer):
    corpus = [Document("é→日" * 100, "f", "g")]
    (prompt,) = choose_prompts(corpus, tokenizer)
    assert corpus[0].text.startswith(prompt)


def test_texts_too_short_to_go_on_from_give_no_prompt(tokenizer):
    assert choose_prompts([Document("x = 1\n\ny = 2\n", "f", "g")], tokenizer) == []


# Rows that cannot be used


def test_bad_rows_are_counted_named_and_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"text": f"text {i}"}) for i in range(4)]
    path.write_text(
        "\n".join([good[0], "{broken", good[1], '{"text": null}', "[1]", good[2], '{"text": ["a"]}', good[3]])
    )
    bad = BadRows(4)
    assert [d.text for d in read_documents(DataConfig(path=(str(path),)), 0.05, bad)] == [f"text {i}" for i in range(4)]
    assert bad.count == 4
    name = path.as_posix()
    assert bad.report() == (
        f"4 unusable rows skipped: {name}:2 is no JSON; {name}:4 has no 'text'; "
        f"{name}:5 is a JSON list, not an object; {name}:7 has list in 'text', not text"
    )
    with pytest.raises(
        TrainingError, match=r":7 has list .* so far: 4, data\.max_bad_rows is 3: mend them or raise it"
    ):
        read(DataConfig(path=(str(path),)), limit=3)
    path.write_bytes(b'{"text": "a"}\n{"text": "Z\xfcrich"}\n')
    assert [d.text for d in read(DataConfig(path=(str(path),)), limit=1)] == ["a"]


def test_a_table_with_a_wrong_row(tmp_path):
    (tmp_path / "rows.csv").write_text('title,text\na,"one, with a comma"\nb,two,three\nc\nd,"four\nlines"\n')
    bad = BadRows(2)
    found = list(read_documents(DataConfig(path=(f"{tmp_path}/rows.csv",)), 0.05, bad))
    assert [(d.name[-6:], d.text) for d in found] == [(".csv:1", "one, with a comma"), (".csv:4", "four\nlines")]
    assert ":2 has more fields than the header" in bad.report()
    assert ":3 has no 'text'" in bad.report()


# The same rows, however they are kept


def test_jsonl_csv_parquet_and_datasets_streamed_or_not_give_the_same(tmp_path):
    import datasets

    rows = [{"body": f"text {i}, with\nlines", "kind": f"k{i % 4}"} for i in range(12)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "set").mkdir()
    for place in ("rows.jsonl", "set/train.jsonl"):
        (tmp_path / place).write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"text_column": "body", "group_column": "kind"}
    expected = [(row["body"], row["kind"], split_of(row["kind"], 0.3)) for row in rows]
    for suffix in ("jsonl", "csv", "parquet"):
        found = read(DataConfig(path=(f"{tmp_path}/rows.{suffix}",), **settings), 0.3)
        assert [(d.text, d.group, d.split) for d in found] == expected
    found = [read(DataConfig(dataset=str(tmp_path / "set"), streaming=s, **settings), 0.3) for s in (True, False)]
    assert found[0] == found[1]
    assert [(d.text, d.group, d.split) for d in found[0]] == expected


def test_held_out_text_may_have_a_file_or_split_of_its_own(tmp_path):
    for name in ("train", "dev"):
        lines = [json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    by_file = DataConfig(path=(f"{tmp_path}/train.jsonl",), eval_path=(f"{tmp_path}/dev.jsonl",))
    found = read(by_file)
    assert {d.split for d in found if d.text.startswith("train")} == {"train"}
    assert {d.split for d in found if d.text.startswith("dev")} == {"validation", "test"}
    assert len(found) == 60
    (tmp_path / "dev.jsonl").rename(tmp_path / "validation.jsonl")
    by_split = read(DataConfig(dataset=str(tmp_path), eval_split="validation"))
    assert [(d.text, d.split) for d in by_split] == [(d.text, d.split) for d in found]


@pytest.mark.parametrize("held_out", ["a.jsonl", "./a.jsonl", "*.jsonl", "same-a.jsonl"])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_file_that_is_trained_on_is_not_held_out_as_well(tmp_path, held_out, is_mixture):
    """Under whatever name, and neither by the source that holds it out nor by another."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "text"}\n')
    (tmp_path / "same-a.jsonl").hardlink_to(tmp_path / "a.jsonl")
    trained_on, eval_path = (f"{tmp_path}/a.jsonl",), (f"{tmp_path}/{held_out}",)
    data = DataConfig(path=trained_on, eval_path=eval_path)
    if is_mixture:
        apart = SourceConfig(path=(f"{tmp_path}/b.jsonl",), eval_path=eval_path)
        data = DataConfig(sources=(SourceConfig(path=trained_on), apart))
    config = replace(load_config(TINY, [f"run.output_dir={tmp_path}/run"]), data=data)
    with pytest.raises(ConfigError, match=r"data\.eval_path has .*a\.jsonl, which data\.path has, too: "):
        prepare_data(config)


def test_a_file_whose_name_is_not_utf8_is_told(tmp_path):
    (tmp_path / os.fsdecode(b"bad\xff0.txt")).write_text("text")
    said = r"data\.path: the name of b'.*/bad\\xff0\.txt' is not UTF-8; rename it or leave it out"
    with pytest.raises(TrainingError, match=said):
        read(DataConfig(path=(f"{tmp_path}/*.txt",)))


@pytest.mark.parametrize("text", ["".join(f"line {n:04}\n" for n in range(400)) + "end", "word " * 500])
def test_of_one_text_file_alone_the_end_is_held_out(tmp_path, text):
    (tmp_path / "mine.txt").write_text(text)
    mine = (f"{tmp_path}/mine.txt",)
    found = read(DataConfig(path=mine), held_out=0.1)
    assert [document.split for document in found] == list(SPLITS)
    assert "".join(document.text for document in found) == text
    assert len({document.group for document in found}) == len({document.name for document in found}) == 3
    for document in found[1:]:
        assert len(document.text) / len(text) == pytest.approx(0.1, abs=0.01)
        assert "\n" not in text or document.text.startswith("line ")
    (tmp_path / "train.txt").write_text("to train on")
    found = read(DataConfig(path=(f"{tmp_path}/train.txt",), eval_path=mine))
    assert [document.split for document in found] == list(SPLITS)
    assert [document.text for document in found[:1]] == ["to train on"]
    assert "".join(document.text for document in found[1:]) == text


def test_several_text_files_are_held_out_whole(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n" * 9)
    found = read(DataConfig(path=(f"{tmp_path}/*.txt",)), held_out=0.2)
    assert len(found) == 30
    assert all(document.split == split_of(document.name, 0.2) for document in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "data: give exactly one of standard_library, path and dataset; 0 are given"),
        ({"path": ("a",), "weight": 0.0}, "data.weight is 0.0; it must be above 0"),
        ({"path": ("a",), "completion_column": "q"}, "data: completion_column goes with prompt_column; give both"),
        ({"dataset": "a", "eval_path": ("b",)}, "data.eval_path goes with path; for a dataset: eval_split"),
        ({"dataset": "a", "eval_split": "train"}, "data.eval_split is 'train', the split that is trained on"),
        ({"standard_library": True, "messages_column": "m"}, "data: standard_library has no columns"),
        ({"path": ("a",), "max_bad_rows": -1}, "data.max_bad_rows is -1; it must be at least 0"),
    ],
)
def test_settings_of_a_source_that_do_not_fit(settings, message):
    with pytest.raises(ConfigError) as caught:
        DataConfig(**settings)
    assert str(caught.value).startswith(message)


def test_a_mixture_and_a_source_exclude_each_other():
    with pytest.raises(ConfigError, match=r"data\.sources and data\.path exclude each other"):
        DataConfig(path=("a",), sources=(SourceConfig(path=("b",)),))
    with pytest.raises(ConfigError, match=r"data\.sources\.weight is -1"):
        SourceConfig(path=("b",), weight=-1.0)


# Mixtures


def mixture(folder, sizes: list[int], weights: list[float]) -> Mixture:
    """Sources whose blocks hold their own number: 1000 · source + block, in every token."""
    parts = []
    for source, size in enumerate(sizes):
        tokens = np.repeat(np.arange(size) + 1000 * source, 32).astype(np.uint16)
        (folder / f"{source}.bin").write_bytes(tokens.tobytes())
        parts.append(Blocks(folder / f"{source}.bin", np.dtype(np.uint16), 32))
    return Mixture(parts, weights)


def test_a_mixture_is_read_in_its_proportions_at_every_length(tmp_path):
    mixed = mixture(tmp_path, [40, 7, 300], [3.0, 1.0, 4.0])
    places = [mixed.place(5, i) for i in range(800)]
    assert Counter(source for source, _ in places) == {0: 300, 1: 100, 2: 400}
    for start in range(0, 800, 8):  # in every cycle, and so in every batch of 8
        assert Counter(source for source, _ in places[start : start + 8]) == {0: 3, 1: 1, 2: 4}
    for source, size in enumerate([40, 7, 300]):  # each source goes through all its blocks before it begins again
        read = [block for s, block in places if s == source]
        for start in range(0, len(read) - size + 1, size):
            assert sorted(read[start : start + size]) == list(range(size))
    uneven = mixture(tmp_path, [9, 9], [0.7123, 0.2877])
    shares = Counter(uneven.place(0, i)[0] for i in range(1000))
    assert shares == {0: 712, 1: 288}


def test_a_mixtures_order_is_a_pure_function_of_seed_and_position(tmp_path):
    mixed, again = (mixture(tmp_path, [40, 7], [2.0, 1.0]) for _ in range(2))
    forwards = [mixed.place(3, i) for i in range(200)]
    assert forwards == [again.place(3, i) for i in reversed(range(200))][::-1]
    assert forwards != [mixed.place(4, i) for i in range(200)]
    for processes, micro in ((1, 8), (2, 2), (4, 1)):
        parts = [p for rank in range(processes) for p in micro_batches(7, 8, micro, rank, processes)]
        rows = torch.cat([mixed.read(3, part).input_ids[:, 0] for part in parts]).tolist()
        assert sorted(rows) == sorted(1000 * s + b for s, b in forwards[56:64])


def test_one_source_is_read_as_it_was_before_there_were_mixtures(tmp_path):
    alone = mixture(tmp_path, [23], [1.0])
    expected = [int(np.random.default_rng([9, i // 23]).permutation(23)[i % 23]) for i in range(100)]
    assert [alone.place(9, i) for i in range(100)] == [(0, block) for block in expected]


def test_held_out_blocks_come_from_every_source(tmp_path):
    mixed = mixture(tmp_path, [100, 3], [1.0, 1.0])
    rows = torch.cat([batch.input_ids for batch in mixed.batches(4, 10)])[:, 0].tolist()
    assert rows == [0, 20, 40, 60, 80, 1000, 1001, 1002]  # the small source has no more


def test_blocks_are_drawn_from_all_over_the_text_by_the_seed(tmp_path):
    mixed = mixture(tmp_path, [100, 3], [1.0, 1.0])
    drawn = [mixed.draw(seed, 10).input_ids[:, 0].tolist() for seed in range(30)]
    assert drawn[4] == mixture(tmp_path, [100, 3], [1.0, 1.0]).draw(4, 10).input_ids[:, 0].tolist()
    for rows in drawn:  # one of each fifth of the large source, and all there is of the small one
        assert [row // 20 for row in rows[:5]] == [0, 1, 2, 3, 4]
        assert rows[5:] == [1000, 1001, 1002]
    assert {row % 20 for rows in drawn for row in rows[:5]} == set(range(20))


def test_what_is_dealt_out_adds_up_and_leaves_nobody_out():
    assert allot(10, [1, 1, 1]) == [4, 3, 3]
    assert allot(1000, [1e-9, 1.0]) == [1, 999]
    assert allot(1, [1.0, 2.0]) == [0, 1]
    random = np.random.default_rng(0)
    for _ in range(50):
        weights = random.uniform(0.01, 1, 5).tolist()
        assert sum(allot(137, weights)) == 137


# Whole documents


def test_answers_stay_whole_and_blocks_are_filled_up():
    random = np.random.default_rng(1)
    lengths = random.integers(1, 33, 500).tolist()
    packer = BestFit(32, padding=0)
    blocks = []
    for number, length in enumerate(lengths, start=1):
        blocks += packer.add([number] * length, [START | TARGET, *[TARGET] * (length - 1)])
    blocks += packer.close()
    assert all(len(ids) == len(marks) == 32 for ids, marks in blocks)
    found = Counter(token for ids, _ in blocks for token in ids)
    padding = found.pop(0)
    assert found == dict(enumerate(lengths, start=1))
    for ids, marks in blocks:
        starts = [i for i, mark in enumerate(marks) if mark & START]
        assert [ids[i] for i in starts] == list(dict.fromkeys(ids))  # each document once, from its beginning
        assert [bool(mark & TARGET) for mark in marks] == [token != 0 for token in ids]
    assert padding < 0.08 * 32 * len(blocks)  # one block after the other would leave a quarter
    assert packer.add([7] * 40, [TARGET] * 40) == [([7] * 32, [TARGET] * 32)]


def test_rows_longer_than_a_block_are_cut_and_left_out_if_nothing_is_left_to_learn(tmp_path):
    rows = [
        ([1] * length, [False] * prompt + [True] * (length - prompt))
        for length, prompt in ((20, 5), (40, 30), (40, 32))
    ]
    encoded = ((Document("", "", ""), Encoded(*row)) for row in rows)
    written = write_tokens(encoded, np.dtype(np.uint16), tmp_path, block=32)
    assert written == ({"train": 20 + 32, "validation": 0, "test": 0}, 2, 1)
    labels = Blocks(tmp_path / "train.bin", np.dtype(np.uint16), 32).rows([0, 1]).labels
    assert (labels != -100).sum(dim=1).tolist() == [2, 15]  # the full block is done first


def test_positions_begin_again_with_each_document():
    starts = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0]]).bool()
    assert position_ids(starts).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]
