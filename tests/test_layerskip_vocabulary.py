"""A reduced draft vocabulary: which tokens, where they are kept, and a head that agrees with the whole one on them."""

import functools
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from layerskip.checkpoint.settings import carried, carry
from layerskip.checkpoint.vocabulary import (
    DRAFT_VOCABULARY_FILE,
    count_tokens,
    coverage,
    draft_vocabulary_of,
    find_draft_vocabulary,
    most_frequent,
    save_draft_vocabulary,
    store_draft_vocabulary,
)
from layerskip.model.anatomy import UnsupportedModelError, anatomy, decoder_layers
from layerskip.model.draft_head import DraftHead, scatter, with_draft_head
from layerskip.model.views import with_layers
from tests import tiny

IDS = torch.tensor([0, 2, 3, 9, 31, 40, 63])
PROMPT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


# --- which tokens


def test_counts_are_the_tokenizers(tokenizer):
    texts = ["def add(a, b):\n    return a + b\n", "the quick brown fox", "", "the fox"]
    expected = torch.zeros(len(tokenizer), dtype=torch.long)
    for text in texts:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            expected[token_id] += 1
    counts = count_tokens(tokenizer, iter(texts))
    assert counts.dtype == torch.long
    assert torch.equal(counts, expected)
    assert counts.sum() > 10


def test_the_most_frequent_win_and_ties_go_to_the_lower_id():
    counts = torch.tensor([5, 0, 7, 5, 5, 0, 9])
    chosen = most_frequent(counts, 3)
    assert chosen.tolist() == [0, 2, 6]
    assert chosen.dtype == torch.long
    assert most_frequent(counts, 5).tolist() == [0, 2, 3, 4, 6]
    assert most_frequent(counts, 7).tolist() == list(range(7))
    assert most_frequent(counts, 3, always=[5, 1, 5]).tolist() == [1, 5, 6]
    assert counts.tolist() == [5, 0, 7, 5, 5, 0, 9]


@pytest.mark.parametrize(
    ("size", "always", "said"),
    [
        (0, (), "size=0: need 1"),
        (8, (), r"to 7 \(the vocabulary\)"),
        (1, (3, 4), r"size=1: need 2 \(tokens always in\)"),
        (3, (7,), "always holds 7 to 7, but token ids are 0 to 6"),
        (3, (-1,), "always holds -1"),
    ],
)
def test_a_choice_that_cannot_be(size, always, said):
    with pytest.raises(ValueError, match=said):
        most_frequent(torch.ones(7, dtype=torch.long), size, always)


def test_coverage_is_a_share_of_the_tokens_not_of_the_kinds():
    counts = torch.tensor([6, 0, 3, 1])
    assert coverage(counts, torch.tensor([0, 3])) == pytest.approx(0.7)
    assert coverage(counts, torch.arange(4)) == 1.0
    with pytest.raises(ValueError, match="no tokens were counted"):
        coverage(torch.zeros(4, dtype=torch.long), torch.tensor([0]))


def test_more_tokens_cover_no_less():
    counts = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(0))
    shares = [coverage(counts, most_frequent(counts, size)) for size in range(1, 301)]
    assert shares == sorted(shares)


# --- where they are kept


def saved(folder, **changes):
    tiny.llama(**changes).save_pretrained(folder)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_checkpoint_carries_it_and_stays_an_ordinary_one(tmp_path):
    plain = load(saved(tmp_path))
    assert draft_vocabulary_of(plain) is None
    assert find_draft_vocabulary(plain.config) is None
    before = json.loads((tmp_path / "config.json").read_text())
    path = store_draft_vocabulary(tmp_path, IDS)
    model = load(tmp_path)
    assert torch.equal(draft_vocabulary_of(model), IDS)
    assert draft_vocabulary_of(model) is draft_vocabulary_of(model)
    assert find_draft_vocabulary(model.config) == path
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == {**before, "layerskip": {"draft_vocabulary": {"size": len(IDS)}}}
    assert torch.equal(model(PROMPT).logits, plain(PROMPT).logits)
    assert not list(tmp_path.glob("*.partial"))


def test_what_else_the_config_carries_stays(tmp_path):
    model = tiny.llama()
    carry(model.config, exits={"1": {"loss": 2.0}})
    model.save_pretrained(tmp_path)
    store_draft_vocabulary(tmp_path, IDS)
    store_draft_vocabulary(tmp_path, IDS[:3])  # another one takes its place
    again = load(tmp_path)
    assert carried(again.config) == {"exits": {"1": {"loss": 2.0}}, "draft_vocabulary": {"size": 3}}
    assert torch.equal(draft_vocabulary_of(again), IDS[:3])


def test_it_moves_on_with_the_model(tmp_path):
    store_draft_vocabulary(saved(tmp_path / "first"), IDS)
    model = load(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    with pytest.raises(FileNotFoundError, match=f"there is no {DRAFT_VOCABULARY_FILE} beside its weights: copy it"):
        draft_vocabulary_of(load(tmp_path / "second"))
    assert save_draft_vocabulary(model, tmp_path / "second") == tmp_path / "second" / DRAFT_VOCABULARY_FILE
    assert torch.equal(draft_vocabulary_of(load(tmp_path / "second")), IDS)
    assert save_draft_vocabulary(tiny.llama(), tmp_path / "second") is None
    carry(model.config, draft_vocabulary=None)
    assert draft_vocabulary_of(model) is None


def test_a_crash_before_the_config_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path)
    before = (tmp_path / "config.json").read_bytes()

    def crash(*arguments, **named):
        raise OSError("disk full")

    monkeypatch.setattr("layerskip.checkpoint.vocabulary.save_file", crash)
    with pytest.raises(OSError, match="disk full"):
        store_draft_vocabulary(tmp_path, IDS)
    assert (tmp_path / "config.json").read_bytes() == before
    assert draft_vocabulary_of(load(tmp_path)) is None


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.tensor([1, 64]), "holds token ids 1 to 64, but the model's are 0 to 63"),
        (torch.tensor([-1, 3]), "holds token ids -1 to 3"),
        (torch.tensor([3, 1]), "must ascend, each once"),
        (torch.tensor([1, 1]), "must ascend, each once"),
        (torch.tensor([1, 3], dtype=torch.int32), r"int64 token ids, got torch.int32 of shape \(2,\)"),
        (torch.tensor([[1, 3]]), r"of shape \(1, 2\)"),
        (torch.tensor([], dtype=torch.long), r"of shape \(0,\)"),
    ],
)
def test_ids_that_are_none_are_refused_in_writing_in_reading_and_in_building(ids, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        DraftHead(tiny.llama(), ids)
    saved(tmp_path)
    with pytest.raises(ValueError, match=said):
        store_draft_vocabulary(tmp_path, ids)
    assert not (tmp_path / DRAFT_VOCABULARY_FILE).exists()
    store_draft_vocabulary(tmp_path, IDS)
    save_file({"token_ids": ids}, tmp_path / DRAFT_VOCABULARY_FILE)
    with pytest.raises(ValueError, match=said) as caught:
        draft_vocabulary_of(load(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_file_of_something_else_is_said_in_one_line(tmp_path):
    store_draft_vocabulary(saved(tmp_path), IDS)
    save_file({"token_ids": IDS[:4]}, tmp_path / DRAFT_VOCABULARY_FILE)
    with pytest.raises(ValueError, match=r"holds 4 token ids but config\.json says 7"):
        draft_vocabulary_of(load(tmp_path))
    save_file({"other": IDS}, tmp_path / DRAFT_VOCABULARY_FILE)
    with pytest.raises(ValueError, match="holds no draft vocabulary"):
        draft_vocabulary_of(load(tmp_path))
    (tmp_path / DRAFT_VOCABULARY_FILE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no draft vocabulary") as caught:
        draft_vocabulary_of(load(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        store_draft_vocabulary(tmp_path, IDS)


# --- the head


def exit_view(model, exit_layer: int = 2):
    return with_layers(model, anatomy(model).layers_path, decoder_layers(model)[:exit_layer])


@torch.no_grad()
def reduced_and_whole(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Exit logits over IDS, by the draft head and by the whole one."""
    view = exit_view(model)
    reduced = with_draft_head(view, model, IDS)(input_ids=PROMPT, use_cache=False).logits
    return reduced, view(input_ids=PROMPT, use_cache=False).logits[..., IDS]


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_says_of_these_tokens_what_its_whole_head_says(name):
    model = tiny.architecture(name)
    reduced, whole = reduced_and_whole(model)
    assert reduced.shape == (*PROMPT.shape, len(IDS))
    torch.testing.assert_close(reduced, whole, atol=1e-5, rtol=1e-5)
    assert whole.std() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied):
    model = tiny.llama(tie_word_embeddings=tied)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    torch.testing.assert_close(*reduced_and_whole(model), atol=1e-5, rtol=1e-5)


def test_a_head_with_a_bias():
    model = tiny.llama()
    head = nn.Linear(32, 64)
    nn.init.normal_(head.bias, std=5.0)
    model.set_output_embeddings(head)
    reduced, whole = reduced_and_whole(model)
    torch.testing.assert_close(reduced, whole, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, whole - head.bias[IDS], atol=0.1)


def test_scales_and_soft_caps_are_not_forgotten():
    """What the head alone says is something else on these three: the model's forward does the rest."""
    for name in ("gemma2", "cohere2", "granite"):
        model = tiny.architecture(name)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(50.0)
        reduced, whole = reduced_and_whole(model)
        torch.testing.assert_close(reduced, whole, atol=1e-4, rtol=1e-5)
        heard = []
        head = DraftHead(model, IDS)
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args, heard=heard: heard.append(args[0])
        )
        exit_view(model)(input_ids=PROMPT, use_cache=False)
        hook.remove()
        assert not torch.allclose(head(heard[0]), whole, atol=0.1, rtol=0.1), name


def test_half_precision():
    reduced, whole = reduced_and_whole(tiny.llama().bfloat16())
    assert reduced.dtype == torch.bfloat16
    torch.testing.assert_close(reduced, whole, atol=0.1, rtol=0.05)


def test_the_view_and_the_model_are_not_touched(tiny_llama):
    view = exit_view(tiny_llama)
    before, names = view(input_ids=PROMPT, use_cache=False).logits, list(tiny_llama.state_dict())
    copy = with_draft_head(view, tiny_llama, IDS)
    assert torch.equal(view(input_ids=PROMPT, use_cache=False).logits, before)
    assert view.get_output_embeddings() is tiny_llama.get_output_embeddings()
    assert list(tiny_llama.state_dict()) == names
    assert copy.get_input_embeddings() is tiny_llama.get_input_embeddings()
    assert {id(p) for p in copy.parameters()} < {id(p) for p in tiny_llama.parameters()}
    assert tiny_llama(PROMPT).logits.shape[-1] == 64


def test_rows_are_copied_once_and_anew_when_the_weights_change(tiny_llama):
    def head():
        return with_draft_head(exit_view(tiny_llama), tiny_llama, IDS.clone()).get_output_embeddings()

    first = head()
    assert first.weight.shape == (len(IDS), 32)
    assert not first.weight.requires_grad
    assert head() is first
    other = with_draft_head(exit_view(tiny_llama), tiny_llama, IDS[:3]).get_output_embeddings()
    assert other.weight.shape == (3, 32)
    first = head()
    old = first.weight.clone()
    optimizer = torch.optim.SGD(tiny_llama.parameters(), lr=0.5)
    tiny_llama(input_ids=PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    assert torch.equal(first.weight, old)  # a copy
    assert head() is not first
    torch.testing.assert_close(*reduced_and_whole(tiny_llama), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["Strange", "NoneType"])
def test_other_heads_are_refused_by_name(tiny_llama, name):
    class Strange(nn.Linear):
        """As quantised heads are: Linear, but with weights of another kind."""

    tiny_llama.lm_head = Strange(32, 64) if name == "Strange" else None
    with pytest.raises(UnsupportedModelError, match="type Strange" if name == "Strange" else "no output embeddings"):
        with_draft_head(tiny_llama, tiny_llama, IDS)


def test_weights_that_are_elsewhere_are_refused(tiny_llama):
    tiny_llama.lm_head = nn.Linear(32, 64, bias=False, device="meta")
    with pytest.raises(UnsupportedModelError, match="on meta, whose rows cannot be copied"):
        DraftHead(tiny_llama, IDS)


def test_a_forward_that_mixes_logits_is_refused(tiny_llama):
    class Shifted(type(tiny_llama)):
        """Adds to each logit what depends on its place, as models that forbid some ids do."""

        @functools.wraps(type(tiny_llama).forward)
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + torch.arange(output.logits.shape[-1])
            return output

    tiny_llama.__class__ = Shifted
    with pytest.raises(UnsupportedModelError, match="Shifted: logits over 7 tokens differ from the whole head's"):
        with_draft_head(exit_view(tiny_llama), tiny_llama, IDS)


def test_scatter_leaves_nothing_outside():
    logits = torch.randn(2, 3, len(IDS))
    full = scatter(logits, IDS, 64)
    assert full.shape == (2, 3, 64)
    assert torch.equal(full[..., IDS], logits)
    q = full.softmax(-1)
    torch.testing.assert_close(q[..., IDS], logits.softmax(-1))
    outside = torch.ones(64, dtype=torch.bool).index_fill(0, IDS, False)
    assert (q[..., outside] == 0).all()
    assert torch.equal(full.argmax(-1), IDS[logits.argmax(-1)])
