"""Files that are whole or as they were, whoever writes them."""

import os
import subprocess
import sys

import pytest

from layerskip.checkpoint.whole_files import read_json, replacing, write_json, write_whole


def test_what_was_written_is_read(tmp_path):
    assert read_json(tmp_path / "absent.json") == {}
    assert write_json(tmp_path / "record.json", {"a": [1]}) == tmp_path / "record.json"
    assert read_json(tmp_path / "record.json") == {"a": [1]}


@pytest.mark.parametrize("moment", ["while it is written", "before it has its name"])
def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path, monkeypatch, moment):
    path = write_whole(tmp_path / "text.txt", "old")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    if moment == "before it has its name":
        monkeypatch.setattr(os, "fsync", full)

    def write() -> None:
        with replacing(path) as partial:
            partial.write_text("new")
            if moment == "while it is written":
                full()

    with pytest.raises(OSError, match="no space"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_costs_no_import_of_torch():
    code = "import sys, layerskip.checkpoint.whole_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
