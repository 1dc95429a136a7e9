"""scripts/debian_stanzas.py: whole sources a line, nothing unforetellable, the same file every time, clear errors."""

import gzip
import json
import lzma
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import debian_stanzas
from train.splits import SPLITS, split_of

ROOT = Path(__file__).resolve().parents[1]


def stanza(package: str, source: str = "", version: str = "1.0-1") -> str:
    return (
        f"Package: {package}\n"
        + (f"Source: {source}\n" if source else "")
        + f"Version: {version}\nInstalled-Size: 77\nDepends: libc6 (>= 2.36), libfoo1 (= {version})\n"
        f"Description: the {package} package\nTag: role::program,\n uitoolkit::sdl\n"
        f"Filename: pool/{package}.deb\nSize: 1234\nMD5sum: 4d471183\nSHA256: 3a2118df\n"
    )


PACKAGES = [
    stanza("libfoo1", "foo"),
    stanza("foo"),
    stanza("libfoo-dev", "foo (1.0-1)"),
    stanza("bar"),
    stanza("bar", version="0.9-1"),
]


def make(tmp_path: Path, content: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "Packages").write_bytes(content)
    command = [sys.executable, "scripts/debian_stanzas.py", "--from", str(tmp_path / "Packages")]
    command += ["--output", str(tmp_path / "out" / "debian.jsonl"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def lines(tmp_path: Path) -> list[dict[str, str]]:
    text = (tmp_path / "out" / "debian.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gz", "xz"])
def test_one_line_a_source_with_all_its_packages(tmp_path, pack):
    result = make(tmp_path, pack("\n".join(PACKAGES).encode()))
    assert result.returncode == 0, result.stderr
    texts = {line["source"]: line["text"] for line in lines(tmp_path)}
    assert sorted(texts) == ["bar", "foo"]
    names = [line for line in texts["foo"].splitlines() if line.startswith("Package: ")]
    assert names == ["Package: foo", "Package: libfoo-dev", "Package: libfoo1"]
    assert "\n\nPackage: libfoo-dev\nSource: foo (1.0-1)\nVersion: 1.0-1\nDepends: libc6 (>= 2.36)," in texts["foo"]
    assert "Tag: role::program,\n uitoolkit::sdl\n" in texts["foo"]  # continuation lines stay
    assert texts["bar"].count("Package: ") == 1  # of two versions the first
    assert "Version: 1.0-1" in texts["bar"]


def test_what_nobody_could_foretell_is_dropped(tmp_path):
    assert make(tmp_path, "\n".join(PACKAGES).encode()).returncode == 0
    fields = {line.partition(":")[0] for item in lines(tmp_path) for line in item["text"].splitlines() if ":" in line}
    assert fields.isdisjoint(debian_stanzas.DROPPED)
    assert {"Package", "Source", "Version", "Depends", "Description", "Tag"} <= fields


def test_the_order_of_the_file_does_not_matter(tmp_path):
    packages = [stanza(f"lib{name}{part}", name) for name in "abcdefgh" for part in ("1", "-dev")]
    results = []
    for seed in range(2):
        random.Random(seed).shuffle(packages)
        assert make(tmp_path, "\n".join(packages).encode()).returncode == 0
        results.append(lines(tmp_path))
    assert results[0] == results[1]
    order = [line["source"] for line in results[0]]
    assert sorted(order) == list("abcdefgh")
    assert order != sorted(order)  # the first few are a sample, not all that begins with "a"


def test_a_source_with_very_many_packages_is_cut(tmp_path):
    packages = [stanza(f"dictionary-{i:02}", "words") for i in range(20)]
    assert make(tmp_path, "\n".join(packages).encode(), "--most-siblings", "3").returncode == 0
    [line] = lines(tmp_path)
    assert line["text"].count("Package: ") == 3


def test_siblings_never_sit_on_two_sides_of_the_split(tmp_path):
    """The trainer holds out whole lines, so a package's name is met on one side only."""
    packages = [stanza(f"lib{i}{part}", f"source{i}") for i in range(60) for part in ("", "-dev", "-doc")]
    random.Random(0).shuffle(packages)
    assert make(tmp_path, "\n".join(packages).encode()).returncode == 0
    sides: dict[str, set[str]] = {}
    for line in lines(tmp_path):
        split = split_of(line["text"], held_out=0.2)  # a line's group is its text, see train/corpus.py
        for name in line["text"].splitlines():
            if name.startswith("Source: "):
                sides.setdefault(name, set()).add(split)
    assert len(sides) == 60
    assert all(len(splits) == 1 for splits in sides.values())
    assert {split for splits in sides.values() for split in splits} == set(SPLITS)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"no packages in here", [], "no package in"),
        (b"\xfd7zXZ broken", [], "is damaged"),
        (b"Package: a\n", ["--most-siblings", "0"], "--most-siblings is 0; it must be at least 1"),
        (b"", ["--from", "/no/such/Packages"], "cannot read /no/such/Packages"),
    ],
)
def test_errors_are_one_line_with_a_way_out(tmp_path, content, arguments, message):
    result = make(tmp_path, content, *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out" / "debian.jsonl").exists()


def test_without_apt_it_says_what_to_give(monkeypatch):
    monkeypatch.setattr(debian_stanzas.shutil, "which", lambda name: None)
    with pytest.raises(debian_stanzas.CorpusError, match=r"there is no apt-cache here; give --from https://"):
        debian_stanzas.read_lines(None)
