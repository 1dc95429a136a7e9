"""Stages equal the model, on every architecture promised; what cannot be cut is refused with the reason."""

import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import layerskip
from layerskip.model.anatomy import UnsupportedModelError, anatomy
from layerskip.model.exit_number import check_exit_layer
from layerskip.model.exit_reader import ExitReader
from layerskip.model.stages import Stages
from tests import tiny

EXITS = range(1, tiny.NUM_LAYERS)


def prompt(length: int = 11) -> torch.Tensor:
    return torch.randint(3, 64, (1, length))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_draft_and_verify_equal_the_model(name):
    """Token-by-token drafting, block verification and rollback against one pass without a cache."""
    model = tiny.architecture(name)
    tokens = torch.randint(3, 64, (1, 26))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    for exit_layer in EXITS:
        stages = Stages(model, exit_layer)
        cache = stages.new_cache(capacity=4)  # grows twice on the way
        stages.prefill(tokens[:, :11], cache)
        for start in range(11, 26, 5):
            block = tokens[:, start : start + 5]
            with torch.no_grad():
                for wrong in (torch.full_like(block, 7), block):  # a rejected block leaves no trace
                    hidden = torch.cat([stages.draft(t, cache)[1] for t in wrong.split(1, dim=1)], dim=1)
                    logits = stages.verify(wrong, hidden, cache)
                    if wrong is not block:
                        cache.rollback(start)
            torch.testing.assert_close(logits, expected[:, start : start + 5], atol=3e-4, rtol=1e-4)
        assert cache.length == 26


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_greedy_output_is_the_models(name):
    model, ids = tiny.architecture(name), prompt()
    expected = model.generate(ids, do_sample=False, max_new_tokens=20)
    for exit_layer in EXITS:
        actual = layerskip.generate(
            model, ids, exit_layer=exit_layer, num_draft_tokens=3, do_sample=False, max_new_tokens=20
        )
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_model_can_be_trained_after_it_was_decoded(name):
    """Nothing made in inference mode is left in the model, or in what was handed out."""
    model = tiny.architecture(name)
    output = layerskip.generate(model, prompt(), exit_layer=2, do_sample=True, max_new_tokens=12)
    model.train()(input_ids=output, labels=output).loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon", "granite"])
def test_exit_logits_are_a_truncated_models(name):
    """Layers [0:E) and the head are the model with E layers."""
    model, ids = tiny.architecture(name), prompt()
    _, exits = ExitReader(model, [2]).read(ids)
    [(exit_layer, actual)] = list(exits)
    logits, _ = Stages(model, 2).draft(ids, Stages(model, 2).new_cache(), 1)
    layers = model.get_submodule(".".join(anatomy(model).layers_path))
    del layers[exit_layer:]
    model.config.num_hidden_layers = exit_layer
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(logits, expected[:, -1:])


def test_the_original_is_untouched(tiny_llama):
    before = {name: (id(module), module.training) for name, module in tiny_llama.named_modules()}
    config = tiny_llama.config.to_dict()
    layerskip.generate(tiny_llama, prompt(), exit_layer=2, do_sample=False, max_new_tokens=5)
    assert before == {name: (id(module), module.training) for name, module in tiny_llama.named_modules()}
    assert config == tiny_llama.config.to_dict()


def test_parameters_are_shared(tiny_llama):
    stages = Stages(tiny_llama, 2)
    own = {id(parameter) for parameter in tiny_llama.parameters()}
    for view in (stages._early, stages._late):
        assert {id(parameter) for parameter in view.parameters()} <= own


def test_a_forward_makes_no_new_layer_list(tiny_llama):
    view = Stages(tiny_llama, 2)._early
    layers = view.model.layers
    assert layers[: tiny_llama.config.num_hidden_layers] is layers
    assert list(layers[1:]) == list(layers)[1:]
    assert layers[0].stands_for is tiny_llama.model.layers[0]


def test_two_threads_do_not_disturb_each_other(tiny_llama):
    prompts = [prompt(6), prompt(9)]
    expected = [tiny_llama.generate(ids, do_sample=False, max_new_tokens=40) for ids in prompts]
    actual: list = [None, None]

    def run(i: int) -> None:
        actual[i] = layerskip.generate(tiny_llama, prompts[i], exit_layer=1 + i, do_sample=False, max_new_tokens=40)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("exit_layer", [0, 4, -1, 2.0, True])
def test_exit_layer_out_of_range(tiny_llama, exit_layer):
    with pytest.raises(ValueError, match="exit_layer"):
        Stages(tiny_llama, exit_layer)


def test_exit_layer_message_names_value_limit_and_way_out():
    with pytest.raises(ValueError, match=r"exit_layer=9 .* 4 layers.* 1 to 3"):
        check_exit_layer(9, 4)


def test_encoder_decoder_is_refused():
    config = T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8, vocab_size=32)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Stages(T5ForConditionalGeneration(config).eval(), 1)


@pytest.mark.parametrize(
    ("model_type", "arguments", "reason"),
    [
        (
            "mamba",
            {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "state_size": 4},
            "recurrent|state",
        ),
        (
            "lfm2",
            {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "vocab_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "layer_types": ["conv", "full_attention"],
                "block_auto_adjust_ff_dim": False,
            },
            "state",
        ),
        (
            "gemma3n_text",
            {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 4,
                "vocab_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 2,
                "head_dim": 8,
                "layer_types": ["full_attention"] * 4,
                "vocab_size_per_layer_input": 32,
                "hidden_size_per_layer_input": 4,
                "activation_sparsity_pattern": [0.0] * 4,
                "laurel_rank": 4,
            },
            "shares keys and values",
        ),
    ],
)
def test_state_that_cannot_be_rolled_back_is_refused(model_type, arguments, reason):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **arguments)).eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        Stages(model, 1)


def test_positions_counted_in_another_way_are_refused():
    config = AutoConfig.for_model(
        "roberta",
        is_decoder=True,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    with pytest.raises(UnsupportedModelError, match="counts positions in a way of its own"):
        Stages(AutoModelForCausalLM.from_config(config).eval(), 1)


def test_a_model_without_a_cache_is_refused():
    config = AutoConfig.for_model("openai-gpt", vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64)
    with pytest.raises(UnsupportedModelError, match="no keys and values"):
        Stages(AutoModelForCausalLM.from_config(config).eval(), 1)


def test_training_mode_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        Stages(tiny_llama.train(), 1)


def test_something_else_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers causal LM"):
        Stages(torch.nn.Linear(2, 2), 1)


def test_self_check_refuses_a_model_whose_cut_differs(tiny_llama):
    """A layer that looks at where it stands in the model's own list is what stages cannot reproduce."""
    original = type(tiny_llama.model.layers[3]).forward

    class Treacherous(type(tiny_llama.model.layers[3])):
        def forward(self, hidden_states, *args, **kwargs):
            out = original(self, hidden_states, *args, **kwargs)
            return out + (0.5 if tiny_llama.model.layers[0].called else 0.0)

    tiny_llama.model.layers[3].__class__ = Treacherous
    first = tiny_llama.model.layers[0]
    first.called = False
    first.register_forward_pre_hook(lambda *_: setattr(first, "called", True))
    tiny_llama.model.layers[2].register_forward_hook(lambda *_: None)
    tiny_llama.model.norm.register_forward_hook(lambda *_: setattr(first, "called", False))
    with pytest.raises(UnsupportedModelError, match="differ from the whole model"):
        Stages(tiny_llama, 2)
