"""`benchmark --html`: one file that holds everything and fetches nothing."""

import base64
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from infer.benchmarking.figures import against_ideal, label
from infer.benchmarking.page import benchmark_page, headline
from infer.command import main
from tests.programs import run

_VOID = {"meta", "img", "source"}
_FLAGS = ("--max-new-tokens", "8", "--num-prompts", "2", "--repeats", "1", "--exit-layers", "1,2")


class Page(HTMLParser):
    """Text by tag, all attributes, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in _VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def page_and_record(tmp_path_factory, tokenizer):
    """Of a small grid, greedy and sampled."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("run") / "a<b>&c"
    tiny.llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = [folder / name for name in ("page.html", "record.json")]
    arms = ("--arms", "loop,chain,early-exit,lookup", "--num-draft-tokens", "2,3", "--sampled")
    assert main(["benchmark", str(folder), *_FLAGS, *arms, "--html", str(files[0]), "--json", str(files[1])]) == 0
    text, found = (file.read_text(encoding="utf-8") for file in files)
    return text, json.loads(found)


def test_the_page_fetches_nothing_and_is_whole(page_and_record):
    text, _ = page_and_record
    page = Page(text)
    links = [value for name, value in page.attributes if name in ("src", "srcset", "href", "action", "data")]
    assert links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "url(" not in text
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<table") == text.count('<div class="scroll"><table')  # scrolls inside its box


def test_figures_are_drawn_for_light_and_dark(page_and_record):
    text, _ = page_and_record
    uris = re.findall(r'(?:src|srcset)="data:image/svg\+xml;base64,([^"]+)"', text)
    roots = [ElementTree.fromstring(base64.b64decode(uri)) for uri in uris]
    assert all(root.tag.endswith("svg") for root in roots)
    titles = re.findall(r'alt="([^"]+)"', text)
    assert len(uris) == 2 * len(titles) == 2 * 9
    assert titles.count("speedup by exit layer and draft length") == 1


def test_the_record_on_the_page_is_the_record(page_and_record):
    text, found = page_and_record
    pages = Page(text)
    assert json.loads(pages.texts["pre"][0]) == found
    assert pages.texts["h1"] == ["a<b>&c: decoding measured"]
    shown = " ".join(pages.texts["td"])
    for mode in ("greedy", "sampled"):
        assert all(label(arm) in shown for arm in found[mode])
    for name in ("prompts_fingerprint", "commit", "threads", "dtype", "torch"):
        if found["conditions"][name] is not None:  # as the commit is outside a checkout
            assert str(found["conditions"][name]) in shown


def test_the_headline_names_the_fastest_and_what_is_equal(page_and_record):
    _, found = page_and_record
    said = headline(found, "greedy")
    fastest = max(found["greedy"][1:], key=lambda arm: arm["speedup"])
    assert f"{fastest['speedup']:.2f}" in said
    assert label(fastest) in said
    assert "All 8 outputs compared are plain generate's, token for token." in said
    slow = {**found, "greedy": [{**arm, "speedup": 0.5} for arm in found["greedy"]]}
    assert headline(slow, "greedy").startswith("Nothing decodes faster than plain generate")


def test_a_fault_and_a_failure_stand_on_the_page(page_and_record):
    _, found = page_and_record
    difference = {
        "prompt": 1,
        "position": 4,
        "expected": 7,
        "actual": None,
        "margin": 0.5,
        "gap": 0.5,
        "rounding": 1e-6,
    }
    tie = {**difference, "actual": 9, "near_tie": True, "expected_text": "<i>", "actual_text": "x"}
    plain, loop, chain, theirs, lookup = found["greedy"]
    chain = {**chain, "equal_outputs": 0, "near_ties": 1, "faults": 1}
    chain["differences"] = [{**difference, "near_tie": False, "expected_text": "a", "actual_text": None}, tie]
    lookup = {**lookup, "num_timeouts": 1, "failures": [{"repeat": 0, "prompt": 1, "reason": "took longer"}]}
    broken = {name: theirs[name] for name in ("arm", "exit_layer", "num_draft_tokens", "drafts")}
    broken |= {"error": "ValueError: no", "num_errors": 2, "num_timeouts": 0, "failures": []}
    changed = {**found, "greedy": [plain, loop, chain, broken, lookup], "validation": []}
    page = Page(benchmark_page(changed))
    cells = page.texts["td"]
    assert cells.count("FAULT") == cells.count("near-tie") == 1
    assert "7 '<i>'" in cells
    assert "(ended)" in cells
    assert "took longer" in cells
    assert f"{label(theirs)}: failed, ValueError: no" in cells
    assert "1 part at near-ties and 1 at what rounding does not explain" in headline(changed, "greedy")


def test_where_nothing_can_be_drawn_there_is_still_a_page(page_and_record):
    _, found = page_and_record
    alone = {**found, "greedy": found["greedy"][:1], "validation": []}
    del alone["sampled"]
    assert "every other arm failed" in benchmark_page(alone)
    assert against_ideal(alone["greedy"], []) is None


def test_batches_and_budgets_have_a_page(tiny_checkpoint, capsys):
    file = tiny_checkpoint / "page.html"
    for flags in (("--batch-sizes", "1,2"), ("--equal-budget", "--num-draft-tokens", "3")):
        arms = () if "--equal-budget" in flags else ("--arms", "chain")
        given = [*_FLAGS[:-1], "2", *flags, *arms, "--html", str(file)]
        assert main(["benchmark", str(tiny_checkpoint), *given]) == 0
        page = Page(file.read_text(encoding="utf-8"))
        assert json.loads(page.texts["pre"][0]) == json.loads(capsys.readouterr().out.splitlines()[-1])
        assert page.texts["figcaption"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--html", "/nowhere/page.html"), "--html /nowhere/page.html: there is no folder /nowhere: make it first"),
        (("--html", "."), "--html . is a folder: name a file"),
        (("--check", "--html", "page.html"), "--check compares greedy outputs, one prompt at a time, and --html"),
        (("--timeout", "2", "--batch-sizes", "2"), "--timeout breaks off a call of one prompt"),
        (("--timeout", "0"), "a number of seconds above 0"),
    ],
)
def test_flags_that_will_not_do(flags, said, tiny_checkpoint, capsys):
    code, _, err = run(["benchmark", str(tiny_checkpoint), *flags], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
