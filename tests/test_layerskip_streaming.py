"""`stream`: the pieces of every row joined are what plain decoding says, wherever in a block it stops."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.streamers import TextIteratorStreamer

import layerskip
from layerskip.decode.streaming import pad_left
from tests import tiny

PROMPTS = ["def add(a, b):", "the", "lazy dog over the quick brown fox"]
SHAPES = [{"num_draft_tokens": 5}, {"tree": (3, 2, 1)}, {"tree": "s3_k2_d5"}, {"lookup": "hybrid"}]


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny.endless(tiny.llama(vocab_size=len(tokenizer), seed=3))


def plain_ids(model, tokenizer, prompt: str, **arguments) -> list[int]:
    """New tokens of transformers' own greedy decoding of one prompt."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    arguments = {"max_new_tokens": 24, "do_sample": False, "tokenizer": tokenizer, "pad_token_id": 0, **arguments}
    return model.generate(**inputs, **arguments)[0, inputs.input_ids.shape[1] :].tolist()


def plain(model, tokenizer, prompt: str, **arguments) -> str:
    return tokenizer.decode(plain_ids(model, tokenizer, prompt, **arguments), skip_special_tokens=True)


def streamed(model, tokenizer, prompts, **arguments) -> tuple[list[str], list[layerskip.Piece]]:
    """The joined text of each row, and all pieces."""
    # Deep exit: blocks of several accepted tokens, so that stops fall inside of them.
    arguments = {"exit_layer": 3, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **arguments}
    pieces = list(layerskip.stream(model, tokenizer, prompts, **arguments))
    texts = ["" for _ in range(1 if isinstance(prompts, str) else len(prompts))]
    for piece in pieces:
        texts[piece.row] += piece.text
        assert piece.step is None or piece.step.row == piece.row
    return texts, pieces


def echo(model, amount: float = 0.05):
    """Weaken the last layer: the exit before it then says nearly the same, and blocks are accepted."""
    with torch.no_grad():
        for weight in (model.model.layers[-1].self_attn.o_proj.weight, model.model.layers[-1].mlp.down_proj.weight):
            weight.mul_(amount)
    return model


@pytest.mark.parametrize("drafting", SHAPES)
def test_rows_of_unequal_prompts_say_what_each_says_alone(model, tokenizer, drafting):
    echo(model)
    texts, pieces = streamed(model, tokenizer, PROMPTS, **drafting)
    assert texts == [plain(model, tokenizer, prompt) for prompt in PROMPTS]
    assert {piece.row for piece in pieces} == {0, 1, 2}
    assert any(piece.step.num_accepted > 1 for piece in pieces if piece.step)
    rows = [piece.row for piece in pieces if piece.step]
    assert rows != sorted(rows)  # together, not one after the other


@pytest.mark.parametrize("drafting", SHAPES)
def test_an_end_inside_a_block_leaks_nothing(model, tokenizer, drafting):
    """Each row ends at another place; the end is taken from the middle of what an accepted block would bring."""
    echo(model)
    _, pieces = streamed(model, tokenizer, PROMPTS, **drafting)
    step = next(p.step for p in pieces if p.step and p.step.num_accepted >= 3 and p.step.tokens.shape[1] >= 3)
    end = int(step.tokens[0, 1])
    texts, ended = streamed(model, tokenizer, PROMPTS, eos_token_id=end, **drafting)
    expected = [plain_ids(model, tokenizer, prompt, eos_token_id=end) for prompt in PROMPTS]
    committed: list[list[int]] = [[], [], []]
    for piece in ended:
        committed[piece.row] += piece.step.tokens[0].tolist() if piece.step else []
    assert committed == expected
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert min(map(len, expected)) < 24
    cut = [p.step for p in ended if p.step and p.step.tokens.shape[1] < p.step.num_accepted + 1]
    assert cut  # the block went on behind the end


def test_a_special_end_token_is_not_shown(model, tokenizer):
    echo(model)
    ids = plain_ids(model, tokenizer, PROMPTS[0])
    with torch.no_grad():  # the end of the sequence becomes what was said fifth
        model.lm_head.weight[tokenizer.eos_token_id] = model.lm_head.weight[ids[4]] * 1.01
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    texts, _ = streamed(model, tokenizer, PROMPTS, num_draft_tokens=6)
    expected = [plain(model, tokenizer, prompt) for prompt in PROMPTS]
    assert texts == expected
    assert all("<eos>" not in text for text in texts)
    assert len(plain_ids(model, tokenizer, PROMPTS[0])) < 24


@pytest.mark.parametrize(("row", "drafting"), [(0, SHAPES[0]), (1, SHAPES[0]), (2, SHAPES[1]), (0, SHAPES[3])])
def test_a_stop_string_inside_a_block_stays_and_nothing_follows(model, tokenizer, drafting, row):
    echo(model)
    whole = [plain(model, tokenizer, prompt) for prompt in PROMPTS]
    places = [i for i in range(3, len(whole[row]) - 4) if whole[row][i : i + 3].isascii()]
    stop = whole[row][places[len(places) // 2] :][:3]
    texts, _ = streamed(model, tokenizer, PROMPTS, stop_strings=[stop], **drafting)
    assert texts == [plain(model, tokenizer, prompt, stop_strings=[stop]) for prompt in PROMPTS]
    assert stop in texts[row]
    assert len(texts[row]) < len(whole[row])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_does_not_matter(model, tokenizer, side):
    expected, _ = streamed(model, tokenizer, PROMPTS)
    tokenizer.padding_side = side
    assert streamed(model, tokenizer, PROMPTS)[0] == expected
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    texts = ["", "", ""]
    for piece in layerskip.stream(
        model, tokenizer, **inputs, exit_layer=3, max_new_tokens=24, do_sample=False, pad_token_id=0
    ):
        texts[piece.row] += piece.text
    assert texts == expected


def test_a_tokenizer_without_a_padding_token_will_do(model, tokenizer):
    expected, _ = streamed(model, tokenizer, PROMPTS)
    tokenizer.pad_token = None
    assert streamed(model, tokenizer, PROMPTS)[0] == expected


def test_characters_of_several_tokens_do_not_mix_between_rows(model, tokenizer):
    """Every row holds back the bytes of its own unfinished character."""
    euro = tokenizer("€")["input_ids"]
    assert len(euro) == 3
    accent = tokenizer("é")["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        step = [
            make_step([token], row) for pair in zip(euro, [*accent, 5], strict=True) for row, token in enumerate(pair)
        ]
        patch.setattr("layerskip.decode.streaming.steps", lambda model, **kwargs: iter(step))
        pieces = list(layerskip.stream(model, tokenizer, ["a", "b"]))
    assert [(piece.row, piece.text) for piece in pieces if piece.text] == [
        (1, "é"),
        (0, "€"),
        (1, tokenizer.decode([5])),
    ]


def test_bytes_that_never_become_a_character_come_at_the_end_of_their_row(model, tokenizer):
    half = tokenizer("é")["input_ids"][:1]
    with pytest.MonkeyPatch.context() as patch:
        steps = [make_step(half, 0), make_step(tokenizer("x")["input_ids"], 1)]
        patch.setattr("layerskip.decode.streaming.steps", lambda model, **kwargs: iter(steps))
        pieces = list(layerskip.stream(model, tokenizer, ["a", "b"]))
    assert [(piece.row, piece.text, piece.step is None) for piece in pieces] == [
        (0, "", False),
        (1, "x", False),
        (0, "�", True),
    ]


def make_step(tokens: list[int], row: int) -> layerskip.Step:
    return layerskip.Step(torch.tensor([tokens]), 0, 0, 0.0, 0.0, 0.0, row=row)


def test_several_outputs_of_one_prompt_are_rows(model, tokenizer):
    arguments = {"num_return_sequences": 2, "do_sample": True, "exit_layer": 2, "max_new_tokens": 8, "pad_token_id": 0}
    pieces = list(layerskip.stream(model, tokenizer, "the quick", **arguments))
    assert {piece.row for piece in pieces} == {0, 1}


def test_a_streamer_of_transformers_gets_what_plain_decoding_gives_it(model, tokenizer):
    echo(model)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    whole = plain(model, tokenizer, PROMPTS[0])
    stop = whole[len(whole) // 2 :][:3]
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "stop_strings": [stop]}
    texts = []
    for generate in (model.generate, lambda **kwargs: layerskip.generate(model, exit_layer=3, **kwargs)):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=1)
        generate(**inputs, **arguments, tokenizer=tokenizer, streamer=streamer)
        texts.append("".join(streamer))
    assert texts[0] == texts[1]
    assert stop in texts[1]


def test_batches_are_filled_up_on_the_left():
    ids, mask = pad_left([[5, 6], [7], [8, 9, 10]], 0)
    assert ids.tolist() == [[0, 5, 6], [0, 0, 7], [8, 9, 10]]
    assert mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("prompt", "said"), [([], "no prompts"), (["a", ""], "prompt 1 is empty"), ("", "prompt 0 is empty")]
)
def test_prompts_that_will_not_do(model, tokenizer, prompt, said):
    with pytest.raises(ValueError, match=said):
        list(layerskip.stream(model, tokenizer, prompt))
