"""Text to blocks: held out by whole sources, packed without loss, in an order that is a pure function."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from train.config import DataConfig
from train.corpus import SPLITS, Document, hash_share, read_documents, split_of
from train.errors import TrainingError
from train.packing import Blocks, block_index, encode, micro_batches, token_dtype, write_tokens
from train.prompts import PROMPT_TOKENS, choose_prompts
from train.vocabulary import END_OF_TEXT, train_tokenizer

WORDS = ["def", "return", "class", "value", "index", "self", "import", "raise", "yield", "lambda"]


def documents(count: int, seed: int = 0) -> list[Document]:
    """Texts of 40 to 200 words, three to a group."""
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, random.integers(40, 200))) for _ in range(count)]
    return [Document(f"{i} {text}", f"file{i}", f"group{i // 3}") for i, text in enumerate(texts)]


# Splits


def test_siblings_never_sit_on_two_sides():
    data = DataConfig(standard_library=True)
    sides: dict[str, set[str]] = {}
    for document in read_documents(data):
        sides.setdefault(document.group, set()).add(split_of(document.group, data.held_out))
        assert document.name.split("/")[0].removesuffix(".py") == document.group
    assert all(len(splits) == 1 for splits in sides.values())
    assert set().union(*sides.values()) == set(SPLITS)


def test_standard_library_leaves_out_its_tests_and_what_is_installed():
    names = [document.name for document in read_documents(DataConfig(standard_library=True))]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages", "idlelib"} & set(n.split("/"))]


def test_a_limited_library_is_a_few_of_everything():
    few = DataConfig(standard_library=True, max_documents=60, held_out=0.15)
    chosen = list(read_documents(few))
    assert len(chosen) == 60
    assert len({document.group for document in chosen}) > 10
    assert {split_of(document.group, few.held_out) for document in chosen} == set(SPLITS)


def test_split_shares_are_those_asked_for_and_stable():
    counts = Counter(split_of(f"group {i}", 0.05) for i in range(20_000))
    for split in ("validation", "test"):
        assert counts[split] / 20_000 == pytest.approx(0.05, abs=0.006)  # four standard deviations
    assert hash_share("asyncio") == 0.5575211824212526  # a run elsewhere, or tomorrow, holds out the same


def test_more_held_out_moves_no_group_back_to_training():
    groups = [f"group {i}" for i in range(2000)]
    held = {share: {g for g in groups if split_of(g, share) != "train"} for share in (0.05, 0.1, 0.2)}
    assert held[0.05] < held[0.1] < held[0.2]


# Sources


def test_local_files_are_read_once_each(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "lines.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n{"body": "  "}\n')
    paths = (f"{tmp_path}/*.*", f"{tmp_path}/**/*.py", f"{tmp_path}/b.txt")
    texts = [d.text for d in read_documents(DataConfig(path=paths, text_column="body"))]
    assert sorted(texts) == ["one", "text of a.md", "text of b.txt", "text of sub/c.py", "two"]


def test_equal_lines_are_one_group(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "same"}\n{"text": "other"}\n{"text": "same"}\n')
    first, second, third = read_documents(DataConfig(path=(f"{tmp_path}/lines.jsonl",)))
    assert first.group == third.group != second.group
    assert len({first.name, second.name, third.name}) == 3


def test_sources_that_cannot_be_read(tmp_path):
    def message(**settings) -> str:
        with pytest.raises(TrainingError) as caught:
            list(read_documents(DataConfig(**settings)))
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
    assert "line 2 of" in message(path=(f"{tmp_path}/bad.jsonl",))


def test_local_dataset_through_datasets(tmp_path):
    rows = [{"content": f"document {i}"} for i in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(dataset=str(tmp_path), text_column="content", max_documents=4)
    assert [d.text for d in read_documents(data)] == [row["content"] for row in rows[:4]]
    with pytest.raises(TrainingError, match=r"data.text_column is 'text'; .* has content"):
        list(read_documents(DataConfig(dataset=str(tmp_path))))
    with pytest.raises(TrainingError, match="cannot load"):
        list(read_documents(DataConfig(dataset=str(tmp_path / "absent"))))


# Tokens and blocks


def test_trained_tokenizer_loses_no_byte_and_knows_its_end():
    tokenizer = train_tokenizer((d.text for d in documents(30)), 300)
    assert len(tokenizer) <= 300
    text = "def größe(): return '→ 日'\n\n\ttab"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT


def test_packing_loses_nothing(tmp_path, tokenizer):
    corpus = documents(90)
    counts = write_tokens(corpus, tokenizer, 0.2, tmp_path)
    for split in SPLITS:
        expected = [
            token
            for document in corpus
            if split_of(document.group, 0.2) == split
            for token in [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
        ]
        assert counts[split] == len(expected) > 0
        blocks = Blocks(tmp_path / f"{split}.bin", token_dtype(len(tokenizer)), 32)
        packed = blocks.rows(range(len(blocks))).flatten().tolist()
        assert packed == expected[: len(packed)]
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
    blocks = Blocks(tmp_path / "test.bin", np.dtype(np.uint16), 32)
    batches = list(blocks.batches(batch_size=4, num_blocks=10))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert (torch.cat(batches)[:, 0] // 32).tolist() == list(range(0, 100, 10))
    assert sum(len(batch) for batch in blocks.batches(4, 1000)) == 100  # all, if there are fewer


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
