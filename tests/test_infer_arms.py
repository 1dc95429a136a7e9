"""transformers' own ways to decode, beside ours: exact, counted rightly, and failing alone."""

import json
from functools import partial

import pytest
import torch

from infer.benchmarking import families
from infer.benchmarking.arms import plain, self_speculative
from infer.benchmarking.measurement import Protocol, measure
from infer.benchmarking.memory import bytes_by_layer, key_value_bytes
from infer.benchmarking.rivals import assistant_model, cache_bytes, compiled, prompt_lookup
from infer.command import main
from infer.options import DecodingOptions
from layerskip.checkpoint.settings import Setting
from tests import tiny
from tests.programs import quiet

GREEDY = DecodingOptions(max_new_tokens=24).generate_arguments()
SAMPLED = DecodingOptions(max_new_tokens=24, temperature=1.0).generate_arguments()


def prompts() -> list[torch.Tensor]:
    return [torch.tensor([[5, 9, 17 + i, 30, 8, 5, 9][: 4 + i]]) for i in range(3)]


@pytest.fixture
def model():
    return tiny.endless(tiny.llama())


@pytest.fixture
def assistant():
    return tiny.endless(tiny.llama(num_layers=1, seed=3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_every_rival_gives_plain_decodings_greedy_output(name, assistant):
    model = tiny.endless(tiny.architecture(name))
    arms = [plain(), prompt_lookup(8), assistant_model(assistant, None, 3), assistant_model(assistant, None, None)]
    measured = measure(model, arms, Protocol(prompts(), GREEDY, 1), quiet)
    for entry in measured:
        assert entry.error is None, entry.error
        assert [o.tokens for o in entry.outputs[0]] == [o.tokens for o in measured[0].outputs[0]]


def test_a_compiled_step_is_exact_and_compiled_once_for_all_prompts(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    measured = measure(model, [plain(), compiled(backend="eager")], Protocol(prompts(), GREEDY, 2), quiet)
    assert measured[1].error is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [o.tokens for o in measured[1].calls] == [o.tokens for o in measured[0].calls]
    assert measured[1].warm_up.timing.num_tokens == 24  # so that compiling is before everything that is counted


def test_without_a_compiler_the_arm_says_so_and_the_others_go_on(model):
    def broken(graph, inputs, **options):
        raise RuntimeError("No working C++ compiler found\nand much more")

    torch._dynamo.reset()
    arms = [plain(), compiled(backend=broken), prompt_lookup(4)]
    measured = measure(model, arms, Protocol(prompts()[:1], GREEDY, 1), quiet)
    assert [entry.error for entry in measured] == [None, "RuntimeError: No working C++ compiler found", None]


@pytest.mark.slow
def test_inductors_output_is_plain_decodings():
    model = tiny.endless(tiny.llama(num_layers=2))
    torch._dynamo.reset()
    measured = measure(model, [plain(), compiled()], Protocol(prompts(), GREEDY, 1), quiet)
    assert measured[1].error is None, measured[1].error
    assert [o.tokens for o in measured[1].outputs[0]] == [o.tokens for o in measured[0].outputs[0]]


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_a_model_that_assists_itself_has_all_its_drafts_accepted(model, num_draft_tokens):
    before = model.generation_config.to_dict()
    twin = tiny.endless(tiny.llama())
    kept = twin.generation_config.to_dict()
    counts = assistant_model(twin, None, num_draft_tokens).run(model, prompts()[0], GREEDY).statistics
    assert counts.num_tokens == 24
    assert counts.num_steps == 24 // (num_draft_tokens + 1)
    assert counts.num_drafted == counts.num_accepted == 24 - counts.num_steps
    assert model.generation_config.to_dict() == before
    assert twin.generation_config.to_dict() == kept
    assert not model.model.layers[-1]._forward_hooks


def test_what_a_lookup_drafts_is_counted(model):
    """A model that says the same token again and again: after the first two, eight are found and accepted each time."""
    with torch.no_grad():
        model.lm_head.weight[7] = 100 * model.lm_head.weight[7].abs()
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.zero_()
        model.model.embed_tokens.weight.abs_()
    output = prompt_lookup(8).run(model, torch.tensor([[3, 4, 5]]), GREEDY)
    assert output.tokens == [7] * 24
    counts = output.statistics
    ours = self_speculative(Setting(None, 0, lookup="only")).run(model, torch.tensor([[3, 4, 5]]), GREEDY).statistics
    assert counts.num_steps < 12
    assert counts.num_accepted == 24 - counts.num_steps
    assert counts.num_accepted <= counts.num_drafted <= 8 * counts.num_steps
    assert ours.num_tokens == counts.num_tokens


def test_a_second_models_cache_is_counted(model, assistant):
    assert cache_bytes(model) == sum(bytes_by_layer(model))
    sizes, own = bytes_by_layer(model), cache_bytes(assistant)
    assert own == sizes[0]
    arm = assistant_model(assistant, None, 3, cache_bytes=own)
    found = key_value_bytes(arm, 10, sizes)
    assert found.total - found.speculation == 10 * sum(sizes)
    assert found.speculation == 3 * sum(sizes) + 13 * own


@pytest.fixture
def folders(tiny_checkpoint, tmp_path, tokenizer):
    """A checkpoint and three assistants: of the same tokens, of fewer, and of as many others."""
    for name, size in (("same", len(tokenizer)), ("fewer", 280), ("others", len(tokenizer))):
        own = tokenizer if name == "same" else tiny.tokenizer(size, text="while other: yield value\n")
        assert len(own) == size
        tiny.llama(num_layers=2, vocab_size=size, seed=5).save_pretrained(tmp_path / name)
        own.save_pretrained(tmp_path / name)
    return {name: tmp_path / name for name in ("same", "fewer", "others")} | {"model": tiny_checkpoint}


@pytest.mark.parametrize("name", ["same", "fewer"])
def test_all_arms_side_by_side_greedy_and_sampled(name, folders, capsys, monkeypatch):
    monkeypatch.setattr(families, "compiled", partial(compiled, backend="eager"))
    arms = ("--arms", "compiled,transformers-lookup,lookup,auto", "--assistant", str(folders[name]), "--sampled")
    flags = ("--repeats", "1", "--max-new-tokens", "10", "--num-prompts", "2", "--num-draft-tokens", "3")
    assert main(["benchmark", str(folders["model"]), *arms, *flags]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    labels = ["plain", "compiled", "prompt_lookup_num_tokens", "lookup only", "auto", "assistant_model"]
    for mode in ("greedy", "sampled"):
        assert [record["arm"] for record in result[mode]] == labels
        assert [record["error"] for record in result[mode]] == [None] * 6
    assert all(record["equal_outputs"] == 2 for record in result["greedy"])
    assert result["greedy"][-1]["num_draft_tokens"] == 3
    assert result["greedy"][1]["warm_up_seconds"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--arms", "assistant"), "arm assistant drafts with a second model: name it, --assistant MODEL"),
        (("--assistant", "runs/none"), "runs/none does not exist"),
        (("--assistant", "{others}", "--arms", "loop"), "has other tokens than"),
        (("--seed", "3"), "--seed 3 does nothing where nothing is sampled: add --sampled"),
        (("--equal-budget", "--arms", "chain"), "compares chains with trees and nothing else: leave --arms out"),
        (("--equal-budget", "--lookup", "hybrid"), "leave --lookup out"),
        (("--answers", "{model}/config.json"), "config.json is a file: name a folder"),
        (("--answers", "{model}", "--batch-sizes", "2"), "--batch-sizes has many: leave one out"),
        (("--answers", "{model}", "--equal-budget"), "--equal-budget has none: leave one out"),
    ],
)
def test_flags_that_will_not_do(flags, said, folders, capsys):
    named = [flag.format(**{name: str(path) for name, path in folders.items()}) for flag in flags]
    assert main(["benchmark", str(folders["model"]), "--exit-layers", "2", *named]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
