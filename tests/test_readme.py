"""Every command and snippet of the README runs, on a tiny run instead of the quickstart's; so do the scripts."""

import re

import pytest

from tests.documents import ROOT, commands, follow, links, on, run, snippets

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = commands(README)
SNIPPETS = snippets(README)


def test_there_is_something_to_run():
    assert len(COMMANDS) >= 9
    assert len(SNIPPETS) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tiny_run, tmp_path, monkeypatch):
    if command.startswith("make "):
        target = command.removeprefix("make ").split()[0]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    if command.startswith("pip "):
        return
    monkeypatch.chdir(ROOT)
    follow(command, tiny_run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets(snippet, tiny_run, capsys):
    exec(compile(on(tiny_run, snippet), "README.md", "exec"), {})


@pytest.mark.slow
def test_the_demo_runs_from_end_to_end(tmp_path):
    output = run(
        "scripts/demo.sh",
        CONFIG="configs/tiny.yaml",
        RUN=str(tmp_path / "run"),
        BENCHMARK="--exit-layers 1,2 --num-draft-tokens 2 --num-prompts 1 --repeats 1 --max-new-tokens 8",
    )
    assert "greedy float32 outputs equal" in output
    assert "Next:" in output
    assert (tmp_path / "run" / "benchmark.json").is_file()


@pytest.mark.slow
def test_overhead_is_measured(tiny_run):
    small = "--exit-layer 2 --prompt-tokens 8 --max-new-tokens 16 --threads 1 --processes 1"
    output = run(f"python scripts/overhead.py {tiny_run} {small}")
    assert '"overhead": ' in output


def test_every_module_is_in_the_tree():
    """The README's tree names every module of the library, and nothing that is gone."""
    tree = README.split("## The tree")[1].split("\nlayerskip/")[1].split("\ntrain/")[0]
    named, room = set(), ""
    for line in tree.splitlines()[1:]:
        if head := re.match(r"  (\w+/) ", line):
            room = head[1]
        elif not line.startswith("    "):
            room = ""
        named |= {room + name for name in re.findall(r"(\w+\.py)", line)}
    modules = [path.relative_to(ROOT / "layerskip").as_posix() for path in (ROOT / "layerskip").rglob("*.py")]
    assert named == {name for name in modules if not name.endswith("__init__.py")}


def test_what_the_readme_links_is_there():
    for target in links(README):
        assert (ROOT / target).exists(), target
