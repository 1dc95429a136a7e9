"""Rows that look like rows and are none: each is counted and named, and takes no other row with it."""

import json

import pytest

from train.bad_rows import BadRows
from train.corpus import read_documents
from train.errors import TrainingError
from train.text_config import DataConfig

GOOD = {
    "text": "good",
    "prompt": "a?",
    "completion": "b",
    "messages": [{"role": "assistant", "content": "b"}],
    "g": "c",
}
HALF = '"abc \\ud800"'  # half of a character that UTF-16 writes in two
DEEP = "[" * 100_000 + "]" * 100_000
TEXT, PAIR, PLAIN, CHAT = (
    {},
    {"prompt_column": "prompt", "completion_column": "completion"},
    {"prompt_column": "prompt", "completion_column": "completion", "as_chat": False},
    {"messages_column": "messages"},
)


def read(tmp_path, line: str, settings: dict, limit: int = 1) -> tuple[int, str]:
    """How many documents two good rows and this line are, and what is said of them."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), line, json.dumps(GOOD)]))
    bad = BadRows(limit)
    found = list(read_documents(DataConfig(path=(str(path),), **settings), 0.05, bad))
    return len(found), bad.report().replace(path.as_posix(), "rows.jsonl")


@pytest.mark.parametrize(
    ("line", "settings", "reason"),
    [
        (f'{{"text": {HALF}}}', TEXT, "has half a character (a lone surrogate) in 'text'"),
        (f'{{"prompt": {HALF}, "completion": "b"}}', PLAIN, "has half a character (a lone surrogate) in 'prompt'"),
        (f'{{"prompt": "a", "completion": {HALF}}}', PAIR, "has half a character (a lone surrogate) in 'completion'"),
        (f'{{"text": "a", "g": {HALF}}}', {"group_column": "g"}, "has half a character (a lone surrogate) in 'g'"),
        (
            f'{{"messages": [{{"role": "assistant", "content": "b", "tool_calls": [{HALF}]}}]}}',
            CHAT,
            "has half a character (a lone surrogate) in 'messages'",
        ),
        (DEEP, TEXT, "is nested too deep to be read"),
        (f'{{"text": {DEEP}}}', TEXT, "is nested too deep to be read"),
        (f'{{"messages": "{DEEP}"}}', CHAT, "is nested too deep to be read"),
        ('{"text": NaN}', TEXT, "has nan in 'text', not text"),
        ('{"text": -Infinity}', TEXT, "has -inf in 'text', not text"),
        ('{"text": true}', TEXT, "has bool in 'text', not text"),
        ('{"prompt": "a", "completion": false}', PLAIN, "has bool in 'completion', not text"),
    ],
)
def test_a_row_that_holds_something_else_is_a_bad_row(tmp_path, line, settings, reason):
    assert read(tmp_path, line, settings) == (2, f"1 unusable row skipped: rows.jsonl:2 {reason}")
    with pytest.raises(TrainingError, match=r"rows.jsonl:2 .* so far: 1, data\.max_bad_rows is 0"):
        read(tmp_path, line, settings, limit=0)


def test_numbers_are_text(tmp_path):
    assert read(tmp_path, '{"text": 0}', TEXT) == (3, "")
    assert read(tmp_path, '{"prompt": "1 - 1 = ", "completion": 0}', PLAIN) == (3, "")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 - 1 = ", "completion": 0}\n')
    [document] = read_documents(DataConfig(path=(str(path),), **PLAIN), 0.05, BadRows(0))
    assert document.text == "1 - 1 = 0"


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ('{"text": ""}', TEXT),
        ('{"text": " \\n"}', TEXT),
        ('{"prompt": "a?", "completion": ""}', PAIR),
        ('{"prompt": "a?", "completion": " "}', PLAIN),
        ('{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": ""}]}', CHAT),
    ],
)
def test_rows_that_say_nothing_are_counted_apart_and_do_no_harm(tmp_path, line, settings):
    assert read(tmp_path, line, settings, limit=0) == (2, "1 row with an empty text or answer left out")
    found, said = read(tmp_path, f"{line}\n{line}\nno json", settings)
    assert found == 2
    assert said == "1 unusable row skipped: rows.jsonl:4 is no JSON; 2 rows with an empty text or answer left out"


def test_where_no_row_is_left_it_is_said_why(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": true}\n' * 2 + '{"text": ""}\n')
    said = (
        r"no document of data\.path=.* holds any text: 2 unusable rows skipped: .*rows\.jsonl:1 has bool in 'text', "
        r"not text; .*rows\.jsonl:2 .*; 1 row with an empty text or answer left out$"
    )
    with pytest.raises(TrainingError, match=said):
        list(read_documents(DataConfig(path=(str(path),)), 0.05, BadRows(9)))


def test_an_empty_text_file_is_one_of_them(tmp_path):
    for name, text in (("a.txt", "text"), ("b.txt", "\n")):
        (tmp_path / name).write_text(text)
    bad = BadRows(0)
    assert len(list(read_documents(DataConfig(path=(f"{tmp_path}/*.txt",)), 0.05, bad))) == 1
    assert bad.report() == "1 row with an empty text or answer left out"
    bad = BadRows(0)
    assert len(list(read_documents(DataConfig(standard_library=True, max_documents=40), 0.05, bad))) == 40
    assert bad.report() == ""


def test_prompts_to_be_answered_need_no_answer(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a?", "completion": ""}\n')
    source = DataConfig(path=(str(path),), **PLAIN)
    assert len(list(read_documents(source, 0.05, BadRows(0), needs_answers=False))) == 1
