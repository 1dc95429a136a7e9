"""Files that flags name: what cannot be written is told before anything is measured, and no record is lost."""

import json
import os

import pytest

from infer.command import main
from infer.errors import InputError
from infer.files import write_record


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["benchmark", "--json", "{to}/b.json"], "--json {to}/b.json cannot be written"),
        (["benchmark", "--html", "{to}/b.html"], "--html {to}/b.html cannot be written"),
        (["benchmark", "--answers", "{to}/a/b"], "--answers cannot write into {to}/a/b"),
        (["load", "--json", "{to}/b.json"], "--json {to}/b.json cannot be written"),
        (["load", "--png", "{to}/b.png"], "--png {to}/b.png cannot be written"),
        (["tune", "--png", "{to}/b.png"], "--png {to}/b.png cannot be written"),
        (["tune", "--write"], "--write cannot write into"),
        (["evaluate", "--json", "{to}/b.json"], "--json {to}/b.json cannot be written"),
        (["inspect", "x", "--html", "{to}/b.html"], "--html {to}/b.html cannot be written"),
        (["vocabulary", "--text", "{to}/no", "--write"], "--write cannot write into"),
    ],
)
def test_a_read_only_folder_is_told_before_the_model_is_loaded(
    argv, said, tiny_checkpoint, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # whoever runs the tests may be root
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    command, *flags = (part.format(to=tmp_path) for part in argv)
    assert main([command, str(tiny_checkpoint), *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said.format(to=tmp_path) in err


def test_a_record_that_cannot_be_kept_is_printed_all_the_same(tmp_path, capsys):
    with pytest.raises(InputError, match="standard output has the record"):
        write_record({"a": 1}, tmp_path)  # a folder, as a full disk would
    assert json.loads(capsys.readouterr().out) == {"a": 1}
