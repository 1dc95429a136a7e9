"""Every page of docs/ is linked, and its commands and snippets run, on a tiny run instead of the quickstart's."""

import runpy
import shlex
from pathlib import Path

import pytest

from tests.documents import ROOT, commands, follow, links, on, snippets
from train.command import load_config

PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = [pytest.param(c, id=f"{name}-{i}") for name, text in TEXTS.items() for i, c in enumerate(commands(text))]
SHOWN = [command for text in (*TEXTS.values(), (ROOT / "README.md").read_text("utf-8")) for command in commands(text)]
SNIPPETS = [pytest.param(s, id=f"{name}-{i}") for name, text in TEXTS.items() for i, s in enumerate(snippets(text))]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    follow(command, tiny_run, tmp_path)


@pytest.mark.parametrize("command", [command for command in SHOWN if " train configs/" in command])
def test_settings_fit_the_config_that_is_named(command):
    """The commands run with a tiny config; these are the settings on the one that the page names."""
    words = shlex.split(command.partition(" train ")[2])
    load_config(ROOT / words[0], [word for word in words[1:] if "=" in word])


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets(snippet, tiny_run, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(on(tiny_run, snippet), "docs", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for target in links(TEXTS[name]):
        assert (ROOT / "docs" / target).exists(), target


def test_every_page_can_be_found():
    """docs/README.md names each other page."""
    named = {Path(target).name for target in links(TEXTS["README.md"])}
    assert named >= set(TEXTS) - {"README.md"}


def test_the_api_reference_says_what_the_docstrings_say():
    page = runpy.run_path(str(ROOT / "scripts" / "api_reference.py"))["page"]
    assert page() == TEXTS["api.md"], "run python scripts/api_reference.py"
