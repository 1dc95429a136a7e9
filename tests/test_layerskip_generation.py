"""generate() is model.generate(): same tokens, same stops, same types, for everything generate takes."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import layerskip
from layerskip.checkpoint.settings import Setting, store_setting, tuned_setting
from layerskip.decode.streaming import Detokenizer
from tests import tiny

PROCESSORS = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5, 6], [7]]},
    "sequence_bias": {"sequence_bias": {(5, 6): -8.0, (9,): 4.0}},
    "min_new_tokens": {"min_new_tokens": 15},
    "forced_eos": {"forced_eos_token_id": 2},
    "suppress": {"suppress_tokens": [4, 5, 6], "begin_suppress_tokens": [8]},
    "length_penalty": {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 9},
    "encoder_penalty": {"encoder_repetition_penalty": 1.4},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1] + k) % 60 + 3 for k in range(9)]},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "eos_token_id": [11, 12]},
}


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(3, 64, (1, 7))


def both(model, ids, exit_layer=2, num_draft_tokens=4, **kwargs):
    """Plain and self-speculative output of the same call."""
    kwargs = {"do_sample": False, "max_new_tokens": 30, **kwargs}
    expected = model.generate(ids, **kwargs)
    return expected, layerskip.generate(model, ids, exit_layer=exit_layer, num_draft_tokens=num_draft_tokens, **kwargs)


@pytest.mark.parametrize("exit_layer", [1, 2, 3, None])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 8])
def test_greedy_equals_generate(tiny_llama, prompt, exit_layer, num_draft_tokens):
    expected, actual = both(tiny_llama, prompt, exit_layer, num_draft_tokens)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_see_each_positions_own_prefix(name, seed):
    model = tiny.llama(seed=seed)
    ids = torch.randint(3, 64, (1, 7), generator=torch.Generator().manual_seed(seed))
    expected, actual = both(model, ids, exit_layer=3, **PROCESSORS[name])
    assert torch.equal(actual, expected)


class OnlyLongerPrefixes(LogitsProcessor):
    """Custom: allows only tokens congruent to the prefix's length."""

    def __call__(self, input_ids, scores):
        allowed = torch.arange(scores.shape[-1]) % 3 == input_ids.shape[1] % 3
        return scores.masked_fill(~allowed, -torch.inf)


def test_custom_processor(tiny_llama, prompt):
    processors = LogitsProcessorList([OnlyLongerPrefixes()])
    expected, actual = both(tiny_llama, prompt, logits_processor=processors)
    assert torch.equal(actual, expected)


def test_every_token_as_end_of_sequence(tiny_llama, prompt):
    """Whichever token ends the sequence, and wherever in a block it falls, the cut is exact."""
    free = tiny_llama.generate(prompt, do_sample=False, max_new_tokens=30)[0, 7:].tolist()
    for token in sorted(set(free)):
        expected, actual = both(tiny_llama, prompt, exit_layer=3, num_draft_tokens=6, eos_token_id=[token, 63])
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("n", range(1, 9))
def test_lengths(tiny_llama, prompt, n):
    for limit in ({"max_new_tokens": n}, {"max_new_tokens": None, "max_length": 7 + n}):
        expected, actual = both(tiny_llama, prompt, exit_layer=3, **limit)
        assert torch.equal(actual, expected)


class StopAfter(StoppingCriteria):
    """Custom: the sum of the new tokens passes a limit."""

    def __init__(self, start: int, limit: int) -> None:
        self.start, self.limit = start, limit

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.start :].sum(1) > self.limit).bool()


@pytest.mark.parametrize("limit", [0, 60, 150, 400])
def test_custom_criteria_cut_at_the_exact_token(tiny_llama, prompt, limit):
    criteria = StoppingCriteriaList([StopAfter(7, limit)])
    expected, actual = both(tiny_llama, prompt, exit_layer=3, num_draft_tokens=6, stopping_criteria=criteria)
    assert torch.equal(actual, expected)


def test_stop_strings_cut_at_the_exact_token(tokenizer):
    model = tiny.llama(vocab_size=len(tokenizer))
    ids = tokenizer("def add(a", return_tensors="pt").input_ids
    free = model.generate(ids, do_sample=False, max_new_tokens=30)
    text = tokenizer.decode(free[0, ids.shape[1] :])
    for start in range(0, len(text) - 3, 4):
        stop = text[start : start + 3]
        expected, actual = both(model, ids, exit_layer=3, num_draft_tokens=6, stop_strings=[stop], tokenizer=tokenizer)
        assert torch.equal(actual, expected)


def test_stop_strings_of_the_checkpoint(tokenizer):
    model = tiny.llama(vocab_size=len(tokenizer))
    ids = tokenizer("def add(a", return_tensors="pt").input_ids
    model.generation_config.stop_strings = ["e", "a"]
    expected, actual = both(model, ids, tokenizer=tokenizer)
    assert torch.equal(actual, expected)


def test_stop_strings_without_a_tokenizer(tiny_llama, prompt):
    with pytest.raises(ValueError, match="tokenizer="):
        layerskip.generate(tiny_llama, prompt, exit_layer=2, stop_strings=["x"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(tiny_llama, prompt, side):
    """Whatever pads the prompt, what follows is what follows the prompt itself."""
    pad = torch.zeros(1, 3, dtype=torch.long)
    padded = torch.cat([pad, prompt] if side == "left" else [prompt, pad], dim=1)
    actual = layerskip.generate(
        tiny_llama,
        input_ids=padded,
        attention_mask=(padded != 0).long(),
        exit_layer=2,
        do_sample=False,
        max_new_tokens=12,
    )
    expected = tiny_llama.generate(prompt, do_sample=False, max_new_tokens=12)
    assert torch.equal(actual[:, :10], padded)
    assert torch.equal(actual[:, 10:], expected[:, 7:])


def test_generation_config_is_honoured_and_not_changed(tiny_llama, prompt):
    config = GenerationConfig(max_new_tokens=9, do_sample=False, repetition_penalty=1.5, eos_token_id=2)
    before = config.to_dict()
    expected = tiny_llama.generate(prompt, generation_config=config)
    actual = layerskip.generate(tiny_llama, prompt, exit_layer=2, generation_config=config)
    assert torch.equal(actual, expected)
    assert config.to_dict() == before


def test_scores_are_the_targets(tiny_llama, prompt):
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, actual = both(tiny_llama, prompt, exit_layer=3, repetition_penalty=1.4, **kwargs)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 30
        torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=2e-3, rtol=1e-3)
    assert actual.statistics.num_tokens == 30


def test_statistics_add_up(tiny_llama, prompt):
    output = layerskip.generate(
        tiny_llama,
        prompt,
        exit_layer=3,
        num_draft_tokens=3,
        do_sample=False,
        max_new_tokens=40,
        return_dict_in_generate=True,
    )
    s = output.statistics
    assert s.num_tokens == 40 == s.num_accepted + s.num_steps
    assert s.mean_acceptance_length == pytest.approx(1 + s.num_accepted / s.num_steps)
    assert s.draft_acceptance_rate == s.num_accepted / s.num_drafted
    assert sum(s.accepted_at) == s.num_accepted
    assert s.acceptance_by_position == sorted(s.acceptance_by_position, reverse=True)
    assert min(s.draft_seconds, s.verify_seconds, s.rollback_seconds) > 0


def test_the_model_as_its_own_perfect_draft(prompt):
    """Layers that add nothing: the exit is the model, and every draft is accepted."""
    model = tiny.llama()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for do_sample in (False, True):
        output = layerskip.generate(
            model,
            prompt,
            exit_layer=2,
            num_draft_tokens=4,
            do_sample=do_sample,
            max_new_tokens=30,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        assert output.statistics.draft_acceptance_rate == 1.0
        assert output.statistics.mean_acceptance_length == 5.0


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.ended = False

    def put(self, value):
        self.blocks.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer_gets_the_prompt_then_every_token_once(tiny_llama, prompt):
    streamer = Recorder()
    output = layerskip.generate(tiny_llama, prompt, exit_layer=3, do_sample=False, max_new_tokens=20, streamer=streamer)
    assert streamer.blocks[0] == prompt[0].tolist()
    assert [t for block in streamer.blocks for t in block] == output[0].tolist()
    assert streamer.ended


def test_text_streamer(tokenizer):
    model = tiny.llama(vocab_size=len(tokenizer))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    inputs = tokenizer("def add(a", return_tensors="pt")
    output = layerskip.generate(
        model,
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        exit_layer=2,
        do_sample=False,
        max_new_tokens=12,
        streamer=streamer,
    )
    assert "".join(streamer) == tokenizer.decode(output[0, inputs.input_ids.shape[1] :])


def test_stream_pieces_join_to_the_output(tokenizer):
    model = tiny.llama(vocab_size=len(tokenizer))
    pieces = list(layerskip.stream(model, tokenizer, "def add(a", exit_layer=2, do_sample=False, max_new_tokens=25))
    ids = tokenizer("def add(a", return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=25)[0, ids.shape[1] :]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(expected, skip_special_tokens=True)
    assert [t for p in pieces if p.step for t in p.step.tokens[0].tolist()] == expected.tolist()


def test_detokenizer_pieces_join_to_the_text():
    """Byte by byte, over characters of several bytes, and over SentencePiece's spaces after a newline."""
    byte_level = tiny.tokenizer()
    for text in ("naïve café 日本語 🙂\n  indented\n", "a\n\n b"):
        detokenizer = Detokenizer(byte_level)
        pieces = [detokenizer.push([i]) for i in byte_level(text).input_ids]
        assert "".join([*pieces, detokenizer.flush()]) == text
        assert all("\ufffd" not in piece for piece in pieces)
    words = Tokenizer(models.WordLevel({"▁a": 0, "\n": 1, "▁b": 2, "<unk>": 3}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    metaspace = PreTrainedTokenizerFast(tokenizer_object=words)
    detokenizer = Detokenizer(metaspace)
    pieces = [detokenizer.push([i]) for i in (0, 1, 2, 0, 1, 1, 0)]
    assert "".join([*pieces, detokenizer.flush()]) == metaspace.decode([0, 1, 2, 0, 1, 1, 0])


def test_same_seed_same_sample(tiny_llama, prompt):
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(layerskip.generate(tiny_llama, prompt, exit_layer=2, do_sample=True, max_new_tokens=30))
    assert torch.equal(*outputs)


def test_cache_is_kept_between_calls(tiny_llama, prompt):
    cache = layerskip.RollbackCache(4)
    kwargs = {"exit_layer": 2, "do_sample": False, "cache": cache, "eos_token_id": None}
    first = layerskip.generate(tiny_llama, prompt, max_new_tokens=9, **kwargs)
    assert cache.length == first.shape[1] - 1
    longer = torch.cat([first, torch.randint(3, 64, (1, 4))], dim=1)
    second = layerskip.generate(tiny_llama, longer, max_new_tokens=9, **kwargs)
    expected = tiny_llama.generate(longer, do_sample=False, max_new_tokens=9, eos_token_id=None)
    assert torch.equal(second, expected)


# --- settings ---


def test_tuned_setting_travels_and_is_used(tmp_path, prompt):
    model = tiny.llama()
    store_setting(model, Setting(exit_layer=3, num_draft_tokens=2))
    model.save_pretrained(tmp_path / "a")
    again = type(model).from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")  # a plain round trip keeps it
    again = type(model).from_pretrained(tmp_path / "b").eval()
    assert tuned_setting(again) == Setting(3, 2)
    output = layerskip.generate(again, prompt, do_sample=False, max_new_tokens=9, return_dict_in_generate=True)
    assert len(output.statistics.drafted_at) == 2
    assert torch.equal(output.sequences, again.generate(prompt, do_sample=False, max_new_tokens=9))


def test_without_a_tuned_setting_it_decodes_plainly_and_says_so(tiny_llama, prompt):
    with pytest.warns(UserWarning, match="no tuned exit layer"):
        output = layerskip.generate(tiny_llama, prompt, do_sample=False, max_new_tokens=5)
    assert torch.equal(output, tiny_llama.generate(prompt, do_sample=False, max_new_tokens=5))


@pytest.mark.parametrize("tuned", [False, True])
def test_a_tree_without_an_exit_to_grow_it_is_told_of(tiny_llama, prompt, tuned, recwarn):
    if tuned:
        store_setting(tiny_llama, Setting(None, 0))
    given = {} if tuned else {"exit_layer": None}
    with pytest.warns(UserWarning, match=r"tree=\(2, 1\).*plain decoding"):
        layerskip.generate(tiny_llama, prompt, tree=(2, 1), do_sample=False, max_new_tokens=2, **given)
    layerskip.generate(tiny_llama, prompt, tree=(2, 1), lookup="only", do_sample=False, max_new_tokens=2, **given)
    layerskip.generate(tiny_llama, prompt, tree=(2, 1), exit_layer=2, do_sample=False, max_new_tokens=2)
    assert not [w for w in recwarn if "tree" in str(w.message)]


def test_a_carried_setting_that_does_not_fit(tiny_llama, prompt):
    tiny_llama.generation_config.layerskip = {"exit_layer": 9, "num_draft_tokens": 2}
    with pytest.raises(ValueError, match="generation_config"):
        layerskip.generate(tiny_llama, prompt)


# --- refusals ---


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"exit_layer": 4}, "1 to 3"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_beams": 3}, "num_beams=1"),
        ({"assistant_model": object()}, "drafts for itself"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"past_key_values": object()}, "RollbackCache"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tiny_llama, prompt, kwargs, message):
    with pytest.raises(ValueError, match=message):
        layerskip.generate(tiny_llama, prompt, **{"exit_layer": 2, **kwargs})


def test_an_early_exit_checkpoint_of_transformers_is_taken_over(tiny_llama, prompt):
    """A checkpoint that asks transformers for its own early exit is decoded by ours, not refused."""
    expected = tiny_llama.generate(prompt, do_sample=False, max_new_tokens=8)
    tiny_llama.generation_config.assistant_early_exit = 2
    actual = layerskip.generate(tiny_llama, prompt, exit_layer=2, do_sample=False, max_new_tokens=8)
    assert torch.equal(actual, expected)


def rope_model(kind: str):
    """A Llama whose positions are rescaled beyond 32."""
    long = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, **long}
    return tiny.llama(max_position_embeddings=128 if kind == "longrope" else 32, rope_parameters=rope)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_length_are_refused_where_they_change(kind, prompt):
    model = rope_model(kind)
    expected, actual = both(model, prompt, max_new_tokens=25)  # up to 32
    assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match=r"decoding to 33 tokens crosses 32"):
        layerskip.generate(model, prompt, exit_layer=2, max_new_tokens=26)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_ids": torch.arange(7)[None]}, "position_ids is not supported"),
        ({"token_type_ids": torch.zeros(1, 7, dtype=torch.long)}, "token_type_ids is not supported"),
        ({"attention_mask": torch.zeros(1, 7, dtype=torch.long)}, "hides every token"),
        ({"cache": layerskip.RollbackCache(3)}, "3 layers and the model 4"),
    ],
)
def test_what_would_be_lost_is_refused(prompt, kwargs, message):
    with pytest.raises(ValueError, match=message):
        layerskip.generate(tiny.architecture("gpt2"), prompt, exit_layer=2, **kwargs)
