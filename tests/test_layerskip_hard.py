"""Long and hard: the model's last positions, chunks, caches of one's own, wrapped models, threads, interruptions."""

import threading
import warnings
from functools import partial

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
)

import layerskip
from layerskip.model.anatomy import anatomy
from layerskip.model.cache_layer import RollbackLayer
from layerskip.model.draft_head import DraftHead
from tests import tiny

MODES = {
    "chain": {"num_draft_tokens": 4},
    "tree": {"tree": (2, 2)},
    "hybrid": {"num_draft_tokens": 3, "lookup": "hybrid"},
}
LENGTHS = {"one": (9,), "three": (9, 4, 6)}


def prompts(*lengths: int, width: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.zeros(len(lengths), width or max(lengths), dtype=torch.long)
    for row, length in zip(input_ids, lengths, strict=True):
        row[-length:] = torch.randint(3, 64, (length,), generator=generator)
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


def both(model, inputs, mode="chain", exit_layer=2, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain and self-speculative output of the same call."""
    kwargs = {"do_sample": False, "max_new_tokens": 20, **inputs, **kwargs}
    return model.generate(**kwargs), layerskip.generate(model, exit_layer=exit_layer, **MODES[mode], **kwargs)


# --- lengths ---


def with_positions(name: str, count: int):
    """A random model of that many positions."""
    model_type, arguments = tiny.ARCHITECTURES[name]
    arguments = {
        key: value for key, value in arguments.items() if key not in ("max_position_embeddings", "n_positions")
    }
    number = "n_positions" if name == "gpt2" else "max_position_embeddings"
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **arguments, **{number: count})
    return tiny.liven(AutoModelForCausalLM.from_config(config)).eval()


@pytest.mark.parametrize("num_tokens", [24, 25])  # transformers too decodes one token more: the last needs no position
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_to_the_models_last_position(name, mode, lengths, num_tokens):
    model, inputs = with_positions(name, 24), prompts(*LENGTHS[lengths])
    free = model.generate(**inputs, do_sample=False, max_length=num_tokens, eos_token_id=None)
    for end in (None, [int(free[0, 20]), int(free[-1, 13])]):  # all rows at the limit, and some before
        expected, actual = both(model, inputs, mode, max_new_tokens=None, max_length=num_tokens, eos_token_id=end)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_padding_takes_no_position(name, mode):
    """What counts is the longest prompt without its padding."""
    inputs = prompts(5, 3, 4, width=30)
    expected, actual = both(with_positions(name, 24), inputs, mode, max_new_tokens=20, eos_token_id=None)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "gpt_bigcode"])
def test_past_a_table_of_positions_is_refused_with_what_fits(name, monkeypatch):
    small = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 8}
    monkeypatch.setitem(tiny.ARCHITECTURES, "gptj", ("gptj", small))
    monkeypatch.setitem(tiny.ARCHITECTURES, "gpt_bigcode", ("gpt_bigcode", small))
    model, inputs = with_positions(name, 24), prompts(9, 4)
    with pytest.raises(ValueError, match=r"table of 24 positions.* at most 16,"):
        layerskip.generate(model, **inputs, exit_layer=2, max_new_tokens=17)
    with pytest.raises(IndexError):  # of transformers itself
        model.generate(**inputs, max_new_tokens=17, do_sample=False, eos_token_id=None)
    assert torch.equal(*both(model, inputs, max_new_tokens=16, eos_token_id=None))
    with pytest.raises(ValueError, match=r"new ones goes past it: shorten the prompt$"):
        layerskip.generate(model, **prompts(25), exit_layer=2, max_new_tokens=1)


@pytest.mark.parametrize("mode", MODES)
def test_past_computed_positions_is_a_warning(mode):
    model, inputs = with_positions("llama", 16), prompts(9, 4)
    with pytest.warns(UserWarning, match="past 16 tokens, the length LlamaForCausalLM was made for") as caught:
        expected, actual = both(model, inputs, mode)
    assert torch.equal(actual, expected)
    assert len(caught) == 1
    with warnings.catch_warnings():  # a limit that no row comes near is none
        warnings.simplefilter("error")
        both(model, inputs, mode, max_new_tokens=200, eos_token_id=list(range(64)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rows_with_lengths_of_their_own_at_the_last_position(name):
    model, inputs = with_positions(name, 24), prompts(16, 5)
    configs = [GenerationConfig(do_sample=False, max_new_tokens=n) for n in (8, 20)]
    actual = layerskip.generate(model, **inputs, exit_layer=2, num_draft_tokens=6, generation_config=configs)
    for row, config in enumerate(configs):
        alone = {key: value[row : row + 1] for key, value in inputs.items()}
        expected = model.generate(**alone, generation_config=config)
        assert torch.equal(actual[row, : expected.shape[1]], expected[0])


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("lengths", [(23,), (23, 1, 14)])
@pytest.mark.parametrize("name", ["llama", "opt", "mistral-window", "gemma3"])
def test_a_prompt_read_in_chunks(name, lengths, chunk):
    model, inputs = tiny.architecture(name), prompts(*lengths)
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    for mode in MODES.values():
        kwargs = {"do_sample": False, "max_new_tokens": 8, "prefill_chunk_size": chunk, **mode}
        assert torch.equal(layerskip.generate(model, **inputs, exit_layer=2, **kwargs), whole)


def test_chunks_are_as_long_as_asked(tiny_llama):
    lengths = []
    tiny_llama.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    layerskip.generate(tiny_llama, **prompts(9), exit_layer=2, max_new_tokens=5)
    lengths.clear()
    layerskip.generate(tiny_llama, **prompts(12), exit_layer=2, max_new_tokens=5, prefill_chunk_size=4)
    assert lengths == [4, 4, 3]  # the last token is the first round's


@pytest.mark.parametrize("chunk", [0, -2])
def test_a_chunk_of_nothing_is_refused(tiny_llama, chunk):
    with pytest.raises(ValueError, match=f"prefill_chunk_size={chunk} reads nothing"):
        layerskip.generate(tiny_llama, **prompts(9), exit_layer=2, max_new_tokens=5, prefill_chunk_size=chunk)


# --- caches ---


def filled(model, input_ids, cache=None) -> layerskip.RollbackCache:
    """A cache that the model itself has filled."""
    cache = layerskip.RollbackCache(tiny.NUM_LAYERS) if cache is None else cache
    with torch.no_grad():
        model(input_ids, **{anatomy(model).cache_argument: cache})
    return cache


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_on_one_cache(name, mode):
    """What the model or a call has read is not read again; afterwards the cache holds all but the last token."""
    model, kwargs = tiny.architecture(name), {"exit_layer": 2, "do_sample": False, "max_new_tokens": 9, **MODES[mode]}
    text = prompts(9)["input_ids"]
    cache = filled(model, text[:, :6])
    for _ in range(2):
        kept = [layer.keys.clone() for layer in cache.layers]
        expected = model.generate(text, do_sample=False, max_new_tokens=9)
        assert torch.equal(layerskip.generate(model, text, cache=cache, **kwargs), expected)
        assert cache.length == expected.shape[1] - 1
        fresh = filled(model, expected[:, :-1])
        for layer, before, whole in zip(cache.layers, kept, fresh.layers, strict=True):
            assert torch.equal(layer.keys[:, :, : before.shape[2]], before)
            torch.testing.assert_close(layer.keys, whole.keys)
            torch.testing.assert_close(layer.values, whole.values)
        text = torch.cat([expected, prompts(5)["input_ids"]], dim=1)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_caches_that_cannot_be_rolled_back_are_refused_with_what_to_give(tiny_llama, argument):
    text, config = prompts(9)["input_ids"], tiny_llama.config
    quantised = object.__new__(QuantizedCache)  # its backend need not be installed
    caches = [DynamicCache(), filled(tiny_llama, text[:, :4], DynamicCache(config=config)), quantised]
    for cache in [*caches, StaticCache(config=config, max_cache_len=64), ((text, text),)]:
        reason = rf"a {type(cache).__name__}: leave it out, or give layerskip\.RollbackCache\(4\)"
        with pytest.raises(ValueError, match=reason):
            layerskip.generate(tiny_llama, text, exit_layer=2, **{argument: cache})


def test_caches_that_do_not_fit_are_refused(tiny_llama):
    inputs, cache = prompts(6, width=9), filled(tiny_llama, prompts(7)["input_ids"])
    with pytest.raises(ValueError, match="holds 7 positions but the prompt has only 6"):  # padding not counted
        layerskip.generate(tiny_llama, **inputs, exit_layer=2, max_new_tokens=3, cache=cache)
    with pytest.raises(ValueError, match="a single sequence, not with 2"):
        layerskip.generate(tiny_llama, **prompts(9, 8), exit_layer=2, max_new_tokens=3, cache=cache)
    configs = [GenerationConfig(max_new_tokens=3)]
    with pytest.raises(ValueError, match="not with a list"):
        layerskip.generate(tiny_llama, **prompts(9), exit_layer=2, generation_config=configs, cache=cache)
    two = filled(tiny_llama, prompts(4, 4)["input_ids"])
    with pytest.raises(ValueError, match="holds 2 sequences"):
        layerskip.generate(tiny_llama, **prompts(9), exit_layer=2, max_new_tokens=3, cache=two)


KINDS = ["static", "offloaded", "offloaded_static", "quantized", "paged"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["argument", "config", "checkpoint"])
def test_kinds_of_cache_are_refused_by_name(tiny_llama, where, kind):
    kwargs = {"exit_layer": 2, "max_new_tokens": 5, "do_sample": False, **prompts(9)}
    expected = tiny_llama.generate(**prompts(9), max_new_tokens=5, do_sample=False)
    if where == "argument":
        kwargs["cache_implementation"] = kind
    elif where == "config":
        kwargs["generation_config"] = GenerationConfig(cache_implementation=kind, max_new_tokens=5)
    else:
        tiny_llama.generation_config.cache_implementation = kind
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}' is not supported.*set it to 'dynamic'"):
        layerskip.generate(tiny_llama, **kwargs)
    if where == "checkpoint":  # the way out
        assert torch.equal(layerskip.generate(tiny_llama, **kwargs, cache_implementation="dynamic"), expected)


def test_no_cache_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="use_cache=False is not supported"):
        layerskip.generate(tiny_llama, **prompts(9), exit_layer=2, max_new_tokens=5, use_cache=False)
    tiny_llama.config.use_cache = False  # a habit of training scripts; transformers' generate looks elsewhere
    assert torch.equal(*both(tiny_llama, prompts(9)))


# --- wrapped models ---


def check_all(wrapped, plain) -> None:
    """Chains, trees and lookups, alone and in batches, equal the plain model."""
    for inputs in (prompts(9), prompts(9, 4, 6)):
        expected = plain.generate(**inputs, do_sample=False, max_new_tokens=10)
        for mode in MODES.values():
            kwargs = {"exit_layer": 2, "do_sample": False, "max_new_tokens": 10, **mode}
            assert torch.equal(layerskip.generate(wrapped, **inputs, **kwargs), expected)


@pytest.mark.parametrize("merged", [False, True])
def test_lora(tiny_llama, merged):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain = tiny_llama.generate(**prompts(9), do_sample=False, max_new_tokens=10)
    adapted = peft.get_peft_model(tiny_llama, config).eval()
    if merged:
        adapted.merge_adapter()
    assert not torch.equal(adapted.generate(**prompts(9), do_sample=False, max_new_tokens=10), plain)
    check_all(adapted, adapted)
    with adapted.disable_adapter():
        check_all(adapted, tiny.llama())


def test_adapters_around_the_forward_are_refused(tiny_llama):
    peft = pytest.importorskip("peft")
    kinds = [peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)]
    kinds.append(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    kinds.append(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]))
    for config, name in zip(kinds, ["PROMPT_TUNING", "PREFIX_TUNING", "activated LORA"], strict=True):
        adapted = peft.get_peft_model(tiny.llama(), config).eval()
        with pytest.raises(layerskip.UnsupportedModelError, match=f"a {name} adapter works around"):
            layerskip.generate(adapted, **prompts(9), exit_layer=2, max_new_tokens=5)


def compile_wrapper(model):
    return torch.compile(model, backend="eager")


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def wrap_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


@pytest.mark.parametrize(
    "compiled",
    [compile_wrapper, compile_in_place, compile_forward, compile_layers, wrap_layers],
    ids=lambda f: f.__name__,
)
def test_compiled_models(tiny_llama, compiled):
    """The wrappers are torch's own; nothing is traced, which would take a minute."""
    with torch.compiler.set_stance("force_eager"):
        check_all(compiled(tiny_llama), tiny.llama())


def test_data_parallel(tiny_llama):
    check_all(torch.nn.DataParallel(tiny_llama), tiny.llama())


def test_gradient_checkpointing(tiny_llama):
    tiny_llama.gradient_checkpointing_enable()
    check_all(tiny_llama, tiny.llama())


PLACES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}


@pytest.mark.parametrize("kind", ["whole", "parts", "offloaded"])
def test_models_under_accelerates_hooks(tiny_llama, kind, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    layers = {f"model.layers.{i}": "disk" if kind == "offloaded" and i in (1, 2) else "cpu" for i in range(4)}
    places = {"": "cpu"} if kind == "whole" else {**PLACES, **layers, "lm_head": layers["model.layers.1"]}
    wrapped = accelerate.dispatch_model(tiny_llama, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    check_all(wrapped, tiny.llama())
    if kind == "offloaded":
        with pytest.raises(layerskip.UnsupportedModelError, match="on meta, whose rows cannot be copied"):
            DraftHead(wrapped, torch.arange(3, 20))


def test_weights_quantised_by_torchao(tiny_llama):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(tiny_llama, quantization.Int8WeightOnlyConfig())
    check_all(tiny_llama, tiny_llama)
    with pytest.raises(layerskip.UnsupportedModelError, match=r"are a Int8Tensor.*draft with the whole head"):
        DraftHead(tiny_llama, torch.arange(3, 20))


@pytest.mark.parametrize("name", ["Linear8bitLt", "Linear4bit"])
def test_weights_quantised_by_bitsandbytes(tiny_llama, name):
    modules = pytest.importorskip("bitsandbytes").nn
    for parent in list(tiny_llama.modules()):
        for child, linear in parent.named_children():
            if type(linear) is torch.nn.Linear:
                quantised = getattr(modules, name)(linear.in_features, linear.out_features, bias=False)
                quantised.weight = type(quantised.weight)(linear.weight.data, requires_grad=False)
                setattr(parent, child, quantised)
    tiny_llama.to("cpu")  # quantises
    check_all(tiny_llama, tiny_llama)
    with pytest.raises(layerskip.UnsupportedModelError, match=f"type {name}, not a plain Linear"):
        DraftHead(tiny_llama, torch.arange(3, 20))


# --- threads and interruptions ---


def test_calls_in_two_threads_do_not_meet(tiny_llama, monkeypatch):
    """Other exits, batches and settings on one model at once say what they say alone."""
    vocabulary = torch.arange(0, 64, 2)
    monkeypatch.setattr("layerskip.decode.preparation.draft_vocabulary_of", lambda _: vocabulary)
    coupled = {"do_sample": True, "acceptance": "coupled"}
    calls = [
        [
            {**prompts(9, 4, 6), "exit_layer": 1, "tree": (2, 2), "do_sample": False},
            {**prompts(12), "exit_layer": 3, "num_draft_tokens": 5, **coupled, "seed": 3, "draft_vocabulary": False},
        ],
        [
            {**prompts(11), "exit_layer": 2, "lookup": "hybrid", "do_sample": False, "draft_vocabulary": False},
            {**prompts(8, 7), "exit_layer": 1, "num_draft_tokens": 3, **coupled, "seed": 5, "temperature": 1.5},
        ],
    ]

    def say(call):
        return layerskip.generate(tiny_llama, max_new_tokens=8, **call)

    alone = [[say(call) for call in own] for own in calls]
    found: list[list[bool]] = [[], []]

    def run(thread):
        for _ in range(20):
            found[thread] += [torch.equal(say(c), e) for c, e in zip(calls[thread], alone[thread], strict=True)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 40] * 2


class Interrupted(StoppingCriteria):
    """Ctrl-C while a row has this many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def interrupt_criterion(model, monkeypatch):
    return {"stopping_criteria": [Interrupted(15)]}


def interrupt_layer(index, model, monkeypatch):
    """In a draft (an early layer) or a verification (a late one), after some passes."""
    calls = []

    def hook(*_):
        calls.append(None)
        if len(calls) == (8 if index == 0 else 4):
            handle.remove()
            raise KeyboardInterrupt

    handle = model.model.layers[index].register_forward_hook(hook)
    return {}


def interrupt_compaction(model, monkeypatch):
    """Between two layers of the cache, while a tree's accepted path is brought together."""
    move, calls = RollbackLayer.move, []

    def halfway(self, *args):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        move(self, *args)

    monkeypatch.setattr(RollbackLayer, "move", halfway)
    return {}


INTERRUPTS = {
    "criterion": interrupt_criterion,
    "draft": partial(interrupt_layer, 0),
    "verification": partial(interrupt_layer, 3),
    "compaction": interrupt_compaction,
}


@pytest.mark.parametrize("interrupt", INTERRUPTS)
@pytest.mark.parametrize("mode", MODES)
def test_an_interruption_leaves_model_and_cache_as_if_the_round_had_not_been(tiny_llama, mode, interrupt, monkeypatch):
    if interrupt == "compaction" and mode != "tree":
        pytest.skip("a chain stands where it is drafted")
    text, kwargs = prompts(9)["input_ids"], {"exit_layer": 3, "do_sample": False, **MODES[mode]}
    expected = tiny_llama.generate(text, do_sample=False, max_new_tokens=20, eos_token_id=None)
    config, cache = tiny_llama.config.to_dict(), layerskip.RollbackCache(tiny.NUM_LAYERS)
    kwargs |= {"cache": cache, "max_new_tokens": 20, "eos_token_id": None}
    layerskip.generate(tiny_llama, text, **{**kwargs, "cache": None})  # the model is checked once
    with monkeypatch.context() as patch:
        arguments = INTERRUPTS[interrupt](tiny_llama, patch)
        with pytest.raises(KeyboardInterrupt):
            layerskip.generate(tiny_llama, text, **kwargs, **arguments)
    assert 8 <= cache.length < 28
    fresh = filled(tiny_llama, expected[:, : cache.length])
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    assert tiny_llama.config.to_dict() == config
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_llama.modules())
    cache.rollback(min(cache.length, 8))
    assert torch.equal(layerskip.generate(tiny_llama, text, **kwargs), expected)
    assert torch.equal(tiny_llama.generate(text, do_sample=False, max_new_tokens=20, eos_token_id=None), expected)


def test_weights_that_stay_elsewhere_until_they_are_needed():
    """accelerate's cpu_offload: between two layers the model has no weights at all."""
    ids = torch.randint(3, 64, (1, 6))
    expected = tiny.llama().generate(ids, do_sample=False, max_new_tokens=8)
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny.llama(), execution_device=torch.device("cpu"))
    for ways in ({"num_draft_tokens": 3}, {"tree": (2, 1)}):
        assert torch.equal(
            layerskip.generate(model, ids, exit_layer=2, max_new_tokens=8, do_sample=False, **ways), expected
        )
