"""A checkpoint that carries its decoding: trusted, it drafts for itself; untrusted, it is an ordinary one."""

import asyncio
import importlib.metadata
import warnings
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from layerskip import Setting, custom_generate
from layerskip.checkpoint.settings import store_setting
from layerskip.custom_generate import remove_custom_generate, write_custom_generate
from layerskip.decode.generation import SelfSpeculativeOutput
from tests import tiny

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module", autouse=True)
def _own_modules_cache(tmp_path_factory):
    """transformers copies trusted code here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def save(folder: Path, setting: Setting | None) -> Path:
    tokenizer = tiny.tokenizer()
    model = tiny.llama(vocab_size=len(tokenizer))
    if setting is not None:
        store_setting(model, setting)
    model.save_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    write_custom_generate(folder)
    return folder


@pytest.fixture(scope="module")
def carrying(tmp_path_factory) -> Path:
    """Folder of a tiny model tuned to three tokens drafted by two layers."""
    return save(tmp_path_factory.mktemp("carrying"), Setting(2, 3))


def trusted(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="float32").eval()


def plain(model, **arguments):
    return GenerationMixin.generate(model, **arguments)


@pytest.fixture
def model(carrying):
    return trusted(carrying)


@pytest.fixture
def inputs(tokenizer):
    return tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended = True

    @property
    def tokens(self):
        return [token for put in self.puts for token in put]


def test_trusted_it_drafts_at_the_tuned_setting_and_says_what_the_model_says(model, inputs):
    arguments = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    output = model.generate(**inputs, **arguments)
    expected = plain(model, **inputs, **arguments)
    assert isinstance(output, SelfSpeculativeOutput)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.statistics.num_drafted > 0
    assert len(output.statistics.drafted_at) == 3  # what it was tuned to
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)


def test_a_streamer_gets_the_prompt_once_and_then_every_token(model, inputs):
    streamer = Recorder()
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False, streamer=streamer)
    assert streamer.puts[0] == inputs.input_ids[0].tolist()
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended


def test_samples_and_batches(model, tokenizer):
    layout = {"padding": True, "padding_side": "left", "return_token_type_ids": False}
    batch = tokenizer([PROMPT, "the fox"], return_tensors="pt", **layout)
    greedy = model.generate(**batch, max_new_tokens=12, do_sample=False)
    assert torch.equal(greedy, plain(model, **batch, max_new_tokens=12, do_sample=False))
    sampling = {"max_new_tokens": 12, "do_sample": True, "top_k": 8, "acceptance": "coupled", "seed": 3}
    drafted = model.generate(**batch, **sampling)
    assert torch.equal(drafted, model.generate(**batch, **sampling, exit_layer=None))


def test_every_way_to_call_it(model, carrying, inputs):
    expected = plain(model, **inputs, max_new_tokens=8, do_sample=False)
    config = GenerationConfig(max_new_tokens=8, do_sample=False)
    ordinary = AutoModelForCausalLM.from_pretrained(carrying, dtype="float32").eval()
    outputs = [
        model.generate(inputs.input_ids, config),
        model.generate(inputs=inputs.input_ids, generation_config=config, assistant_model=None, streamer=None),
        ordinary.generate(
            **inputs, max_new_tokens=8, do_sample=False, custom_generate=str(carrying), trust_remote_code=True
        ),
    ]
    for output in outputs:
        assert torch.equal(output, expected)


@pytest.mark.filterwarnings("error")
def test_untrusted_it_is_an_ordinary_model_without_a_word(carrying, inputs, capfd):
    model = AutoModelForCausalLM.from_pretrained(carrying, dtype="float32").eval()
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert "generate" not in vars(model)
    assert not isinstance(output, SelfSpeculativeOutput)
    assert "custom" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_beams": 2}, "beam search cannot be drafted for: set num_beams=1"),
        ({"use_cache": False}, "use_cache=False is not supported by layerskip.generate"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is not supported"),
    ],
)
def test_what_is_refused_is_decoded_by_transformers_with_the_reason(arguments, said, model, inputs):
    arguments = {"max_new_tokens": 6, "do_sample": False, **arguments}
    streamer = None if "num_beams" in arguments else Recorder()
    with pytest.warns(UserWarning, match=f"decoded by transformers, without drafts: {said}"):
        output = model.generate(**inputs, **arguments, streamer=streamer)
    expected = plain(model, **inputs, **arguments)
    if "return_dict_in_generate" in arguments:
        output, expected = output.sequences, expected.sequences
    assert torch.equal(output, expected)
    assert streamer is None or streamer.tokens == expected[0].tolist()  # the prompt once


def test_who_asks_for_drafts_is_told_what_is_refused(model, inputs):
    with pytest.raises(ValueError, match="exit_layer=4 is out of range"):
        model.generate(**inputs, max_new_tokens=4, exit_layer=4)
    with pytest.raises(ValueError, match="beam search cannot be drafted for"):
        model.generate(**inputs, max_new_tokens=4, exit_layer=2, num_beams=2)


def test_an_error_once_decoding_has_begun_does_not_begin_it_anew(model, inputs):
    class Broken(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 3:
                raise ValueError("the reader is gone")

    streamer = Broken()
    with pytest.raises(ValueError, match="the reader is gone"):
        model.generate(**inputs, max_new_tokens=16, do_sample=False, streamer=streamer)
    assert len(streamer.puts) == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("calls_before", [0, 3])
def test_an_error_of_a_logits_processor_ends_the_call(calls_before, model, inputs):
    """Where it comes from, without a streamer: once decoding is under way nothing is decoded anew."""
    lengths = []

    def broken(input_ids, scores):
        lengths.append(input_ids.shape[1])
        if len(lengths) > calls_before:
            raise ValueError("the bias has another vocabulary")
        return scores

    with pytest.raises(ValueError, match="the bias has another vocabulary"):
        model.generate(**inputs, max_new_tokens=16, do_sample=False, logits_processor=LogitsProcessorList([broken]))
    assert len(lengths) == calls_before + 1


def test_tuned_to_off_it_is_plain_and_untuned_it_says_so(tmp_path, inputs):
    arguments = {**inputs, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    off = trusted(save(tmp_path / "off", Setting(None, 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = off.generate(**arguments)
    untuned = trusted(save(tmp_path / "untuned", None))
    with pytest.warns(UserWarning, match="carries no tuned exit layer"):
        assert torch.equal(untuned.generate(**arguments).sequences, output.sequences)
    assert not isinstance(output, SelfSpeculativeOutput)


@pytest.fixture
def speculated(monkeypatch):
    """What the loop gave, call by call."""
    outputs = []

    def watch(*args, **kwargs):
        outputs.append(run(*args, **kwargs))
        return outputs[-1]

    run = custom_generate.run
    monkeypatch.setattr(custom_generate, "run", watch)
    return outputs


def test_transformers_serve_streams_it(model, carrying, inputs, speculated):
    """By what `transformers serve` calls for a request; `transformers chat` is a client of that server."""
    serving = pytest.importorskip("transformers.cli.serving.utils")
    tokenizer = AutoTokenizer.from_pretrained(carrying)
    config = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=0)
    expected = plain(model, **inputs, generation_config=config)[0, inputs.input_ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)

    async def ask() -> tuple[list[str], str]:
        manager = serving.GenerateManager()
        queue, _ = manager.generate_streaming(model, tokenizer, dict(inputs), config, "a")
        pieces = []
        while (piece := await asyncio.wait_for(queue.get(), 60)) is not None:
            pieces.append(piece)
        whole, _, _ = await manager.generate_non_streaming(model, tokenizer, dict(inputs), config, "b")
        manager.stop()
        return pieces, whole

    pieces, whole = asyncio.run(ask())
    assert len(speculated) == 2
    assert len(pieces) > 1
    assert "".join(pieces) == whole == text


def test_a_pipeline_uses_it(carrying, speculated):
    generator = pipeline("text-generation", model=str(carrying), trust_remote_code=True, dtype="float32", device="cpu")
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    text = generator(PROMPT, **arguments)[0]["generated_text"]
    assert len(speculated) == 1
    untrusted = pipeline("text-generation", model=str(carrying), dtype="float32", device="cpu")
    assert untrusted(PROMPT, **arguments)[0]["generated_text"] == text
    assert len(speculated) == 1


def test_without_the_kit_the_error_names_what_to_install(carrying, monkeypatch):
    found = importlib.metadata.version

    def version(name):
        if name == "layerskip-kit":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="layerskip-kit"):
        trusted(carrying)


def test_it_is_taken_out_again_but_not_that_of_others(tmp_path):
    path = write_custom_generate(tmp_path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["generate.py", "requirements.txt"]
    assert remove_custom_generate(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not remove_custom_generate(tmp_path)
    write_custom_generate(tmp_path).write_text("def generate(model, **kwargs): ...")
    with pytest.raises(ValueError, match="is not ours"):
        remove_custom_generate(tmp_path)
