"""Every page of docs/ is linked, and its commands and snippets run, on a tiny run instead of the quickstart's."""

import runpy
import shlex
from pathlib import Path

import pytest

from infer.command import main
from tests.documents import ROOT, cheap, commands, links, on, run, snippets

PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = [pytest.param(c, id=f"{name}-{i}") for name, text in TEXTS.items() for i, c in enumerate(commands(text))]
SNIPPETS = [pytest.param(s, id=f"{name}-{i}") for name, text in TEXTS.items() for i, s in enumerate(snippets(text))]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tiny_run, tmp_path, monkeypatch, capsys):
    """Through the door of the program, in this process where a shell is not needed: importing torch takes seconds."""
    command = cheap(on(tiny_run, command))
    words = shlex.split(command)
    monkeypatch.chdir(ROOT)
    if words[:3] == ["python", "-m", "infer"] and not set(words) & {"|", ">", ">>", "<", "&&", ";"}:
        assert main(words[3:]) == 0, capsys.readouterr().err[-2000:]
        return
    if "accelerate launch" in command or "python -m train configs" in command:
        command += f" run.output_dir={tmp_path / 'run'} optim.max_steps=2"
    run(command)


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
