"""inspect: a layer's words are those of a model cut there; rounds are what was drafted; page and table show both."""

import copy
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer.command import main
from infer.inspecting.page import page
from infer.inspecting.picture import decode_watched, read_layers
from infer.inspecting.table import choose_layers
from infer.inspecting.words import Words, visible
from infer.loading import Loaded
from infer.options import DecodingOptions
from layerskip.checkpoint.settings import Setting, store_setting
from layerskip.checkpoint.vocabulary import store_draft_vocabulary
from layerskip.model.adapters import attach_adapters
from tests import tiny
from tests.programs import run

PROMPT = "def add(a, b):\n\treturn </script><b>"


@pytest.fixture
def loaded(tokenizer):
    """A tiny Llama that never ends a text."""
    model = tiny.endless(tiny.llama(vocab_size=len(tokenizer)))
    return Loaded("tiny", model, tokenizer)


def truncated(model, exit_layer: int):
    """The logits (T, vocab) function of the first layers alone, by transformers' own forward."""
    model = copy.deepcopy(model)
    adapters = model._modules.pop("layerskip_adapters", {})
    adapter = dict(adapters).get(str(exit_layer))
    model.model.layers = model.model.layers[:exit_layer]
    model.config.num_hidden_layers = exit_layer
    if adapter is not None:
        model.model.norm.register_forward_pre_hook(lambda module, args: (adapter(args[0]),))
    with torch.no_grad():
        return lambda ids: model.eval()(torch.tensor([list(ids)])).logits[0].detach()


def test_every_layer_says_what_a_model_cut_there_says(loaded):
    adapter = attach_adapters(loaded.model, [2], 4)["2"]
    torch.nn.init.normal_(adapter.up.weight)
    ids = loaded.tokenizer(PROMPT)["input_ids"]
    picture = read_layers(loaded, ids)
    words = []
    final = truncated(loaded.model, 4)(ids).softmax(-1)
    chosen = final.argmax(-1)
    for layer in (1, 2, 3, 4):
        p = truncated(loaded.model, layer)(ids).softmax(-1)
        values, indices = p.topk(5)
        assert torch.equal(picture.top_ids[layer - 1], indices)
        torch.testing.assert_close(picture.top_probabilities[layer - 1], values, atol=1e-4, rtol=1e-3)
        order = p.argsort(-1, descending=True)
        assert torch.equal(picture.ranks[layer - 1], (order == chosen[:, None]).long().argmax(-1) + 1)
        torch.testing.assert_close(picture.probabilities[layer - 1], p.gather(1, chosen[:, None])[:, 0])
        words.append(indices[:, 0].tolist())
    for t, settled in enumerate(picture.settled.tolist()):
        said = [layer[t] for layer in words]
        assert all(word == said[-1] for word in said[settled - 1 :])
        assert settled == 1 or said[settled - 2] != said[-1]


def greedy(loaded, ids, number) -> list[int]:
    output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=number, do_sample=False)
    return output[0, len(ids) :].tolist()


def test_rounds_are_what_the_exit_drafted_and_the_model_said(loaded):
    ids = loaded.tokenizer(PROMPT)["input_ids"]
    exit_logits, model_logits = truncated(loaded.model, 2), truncated(loaded.model, 4)
    rounds = decode_watched(loaded, ids, Setting(2, 3), DecodingOptions(max_new_tokens=20))
    committed = list(ids)
    for each in rounds:
        context = list(committed)
        for (token,) in each.drafted:
            assert token == int(exit_logits(context)[-1].argmax())
            context.append(token)
        accepted = [level[0] for level in each.drafted[: each.num_accepted]]
        assert list(each.tokens[: each.num_accepted]) == accepted
        committed += each.tokens
        if len(each.tokens) > each.num_accepted:
            own = each.tokens[-1]
            assert own == int(model_logits(committed[:-1])[-1].argmax())
            assert not each.rejected or own not in each.rejected[0]
    assert committed[len(ids) :] == greedy(loaded, ids, 20)
    assert any(each.rejected for each in rounds)
    assert any(each.num_accepted for each in rounds)


@pytest.mark.parametrize("setting", [Setting(2, 3, tree=(3, 2)), Setting(2, 3, tree="s3_k3_d5"), Setting(None, 0)])
def test_of_trees_the_accepted_path_is_among_what_was_drafted(setting, loaded):
    ids = loaded.tokenizer(PROMPT)["input_ids"]
    rounds = decode_watched(loaded, ids, setting, DecodingOptions(max_new_tokens=16))
    for each in rounds:
        for level, token in zip(each.drafted, each.tokens[: each.num_accepted], strict=False):
            assert token in level
        if setting.tree is None:
            assert each.num_drafted == 0
        elif len(each.tokens) > each.num_accepted and each.rejected:
            assert len(set(each.rejected[0])) == len(each.rejected[0]) > 0
    assert [token for each in rounds for token in each.tokens] == greedy(loaded, ids, 16)


class Cells(HTMLParser):
    """The table's cells, and every address that the page asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "td" and data.strip():
            self.cells[-1] += data


def test_the_page_holds_every_layer_and_fetches_nothing(loaded):
    ids = loaded.tokenizer(PROMPT)["input_ids"]
    picture, words = read_layers(loaded, ids), Words(loaded.tokenizer)
    html = page("a <name>", picture, words, 2, [2])
    parser = Cells()
    parser.feed(html)
    assert parser.addresses == []
    assert "b" not in parser.tags[parser.tags.index("table") :]  # the text's own tags are text
    assert not re.search(r"url\(|@import|https?:", html)
    assert parser.tags.count("script") == 2
    shown = [words.of(token) for layer in picture.top_ids.flip(0)[..., 0].tolist() for token in layer]
    assert parser.cells == shown
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])
    for layer in range(4):
        for t in range(len(ids)):
            rank, _, *best = data["layers"][layer][t]
            assert rank == picture.ranks[layer, t]
            assert [data["words"][index] for index in best[::2]] == [
                words.of(token) for token in picture.top_ids[layer, t].tolist()
            ]
    assert data["settled"] == picture.settled.tolist()


def test_words_can_be_seen_and_add_up_to_the_text(tokenizer):
    words = Words(tokenizer)
    ids = tokenizer(PROMPT)["input_ids"]
    assert "".join(words.text(token) for token in ids) == PROMPT
    assert "".join(words.of(token) for token in ids) == "def·add(a,·b):⏎⇥return·</script><b>"
    assert all(words.of(token).isprintable() and words.of(token).strip() for token in range(len(tokenizer)))
    assert words.of(10**6) == "<1000000>"
    assert visible("a\x1b[31m\u202e") == "a\\x1b[31m\\x202e"


@pytest.mark.parametrize("num_layers", [2, 4, 30, 80])
@pytest.mark.parametrize("width", [40, 80, 160, 400])
@pytest.mark.parametrize("exit_layer", [None, 1])
def test_layers_that_fit_have_the_exit_and_the_last_among_them(num_layers, width, exit_layer):
    layers = choose_layers(num_layers, exit_layer, width)
    assert layers == sorted(set(layers))
    assert layers[-1] == num_layers
    assert exit_layer is None or exit_layer in layers
    assert len(layers) == min(num_layers, max(2, (width - 58) // 14))


def test_the_command_shows_the_tuned_decoding(tiny_checkpoint, tokenizer, tmp_path, capsys, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    store_setting(model, Setting(3, 2))
    model.save_pretrained(tiny_checkpoint)
    store_draft_vocabulary(tiny_checkpoint, torch.arange(3, len(tokenizer), 2))
    file = tmp_path / "page.html"
    argv = ["inspect", str(tiny_checkpoint), PROMPT, "--max-new-tokens", "8"]
    assert main([*argv, "--html", str(file)]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {file}" in err
    assert "layer 3" in out
    assert "(layer 3)" in out
    assert "⏎" in out
    assert max(len(line) for line in out.splitlines()) <= 160
    body = [line for line in out.splitlines() if "%" not in line and line.startswith("  ")]
    assert len(body) >= len(tokenizer(PROMPT)["input_ids"]) + 8
    assert '<tr class="exit">' in file.read_text(encoding="utf-8")
    assert main([*argv[:3], "--max-new-tokens", "0", "--exit-layer", "none"]) == 0
    assert "accepted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["x", "--html", "{tmp}/nowhere/a.html"], "there is no folder {tmp}/nowhere"),
        (["x", "--html", "{tmp}"], "--html {tmp} is a folder: name a file"),
        (["x", "--max-new-tokens", "-1"], "argument --max-new-tokens: '-1' is not a whole number, 0 or more"),
        (["x", "--exit-layer", "9"], "exit_layer=9 is out of range"),
        ([""], "PROMPT is empty"),
        (["x", "--max-new-tokens", "300"], "the model has 256 positions"),
    ],
)
def test_errors_are_told_in_a_line(argv, said, tiny_checkpoint, tmp_path, capsys):
    asked = [part.format(tmp=tmp_path) for part in argv]
    code, out, err = run(["inspect", str(tiny_checkpoint), *asked], capsys)
    assert (code, out) == (2, "")
    assert said.format(tmp=tmp_path) in err.splitlines()[-1]
