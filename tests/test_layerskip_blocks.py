"""An exit's block: a layer of the draft alone. The output stays the model's, and drafts are what the block makes of
all the tokens before, however they came into the cache."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import layerskip
from layerskip.draft.exits import known_exits
from layerskip.forecast import measure_exits
from layerskip.model.adapters import adapter_at, attach_adapters
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.model.cache import RollbackCache
from layerskip.model.exit_layers import ExitBlocks
from layerskip.model.exit_reader import ExitReader
from layerskip.model.stages import Stages
from layerskip.share.export import export_draft
from layerskip.training.recipe import Recipe, prepare
from tests import tiny
from tests.test_layerskip_batch import GREEDY, WAYS, batch, decoded

RECIPE = Recipe.preset("frozen-target", adapter_blocks=1)


def with_block(model, exit_layer: int = 2, noise: float = 0.3, blocks: int = 2):
    """The model with blocks that are no longer what they were copied from."""
    block = attach_adapters(model, [exit_layer], blocks=blocks)[str(exit_layer)].eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in block.parameters():
            weight += noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return model


def text(rows: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def test_a_new_block_is_the_layer_it_was_copied_from(tiny_llama):
    """Its exit is then the next one, and nothing that hangs on the layer hangs on the copy."""
    hook = tiny_llama.model.layers[2].register_forward_hook(lambda *_: pytest.fail("the copy called the layer's hook"))
    attach_adapters(tiny_llama, [2], blocks=1)
    hook.remove()
    assert adapter_at(tiny_llama, 2).layers[0].self_attn.config is tiny_llama.config
    _, exits = ExitReader(tiny_llama, [2, 3]).read(text())
    logits = dict(exits)
    assert torch.equal(logits[2], logits[3])


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_drafts_are_the_exits_of_one_pass(name):
    """In chunks over the cache, after a rollback, in rows of unequal length: what one pass over the text gives."""
    model = with_block(tiny.architecture(name))
    ids = text(1, 12)
    expected = dict(ExitReader(model, [2]).read(ids)[1])[2]
    stages = Stages(model, 2)
    cache = stages.new_cache(4)
    stages.prefill(ids[:, :5], cache)
    first, _ = stages.draft(ids[:, 5:9], cache, 4)
    cache.rollback(5)
    logits, hidden = stages.draft(ids[:, 5:8], cache, 3)
    stages.verify(ids[:, 5:8], hidden, cache)
    stages.verify(ids[:, 8:10], None, cache)  # what nobody drafted passes through the block too
    last, _ = stages.draft(ids[:, 10:], cache, 2)
    torch.testing.assert_close(first, expected[:, 5:9], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits, expected[:, 5:8], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, expected[:, 10:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_batch_is_generates(name, way):
    model, (ids, mask) = with_block(tiny.architecture(name)), batch()
    assert torch.equal(decoded(model, ids, mask, **WAYS[way]), model.generate(ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].get("exit_layer", 2)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_block_sees_every_token(name, way, monkeypatch):
    """After some rounds its keys are those of one pass over each row, whatever was drafted, refused and moved."""
    model, (ids, mask) = with_block(tiny.endless(tiny.architecture(name)), noise=0.05), batch()
    made, caches = Stages.new_cache, []
    monkeypatch.setattr(Stages, "new_cache", lambda *args: caches.append(made(*args)) or caches[-1])
    rows, rounds = [ids[i, real] for i, real in enumerate(mask.bool())], [0, 0, 0]
    arguments = {"attention_mask": mask, "exit_layer": 2, "max_new_tokens": 80, "do_sample": False}
    for step in layerskip.steps(model, ids, **arguments, **WAYS[way]):
        rows[step.row] = torch.cat([rows[step.row], step.tokens[0]])
        rounds[step.row] += 1
        if rounds == [6, 6, 6]:
            break
    cache = next(cache for cache in caches if cache.blocks and len(cache.blocks[2][0].keys) == 3)
    for row, tokens in enumerate(rows):
        stages = Stages(model, 2)
        fresh = made(stages)
        stages.prefill(tokens[None, :-1], fresh)
        for layer, expected in zip(
            [*cache.blocks[2], cache.layers[0]], [*fresh.blocks[2], fresh.layers[0]], strict=True
        ):
            actual = layer.keys[row, :, : len(tokens) - 1]
            torch.testing.assert_close(actual, expected.keys[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("way", ["chain", "tree", "hybrid", "stop"])
def test_what_is_accepted_is_what_one_pass_foretells(way, tiny_llama):
    """Acceptance over a text of the model's own, walked: only right if every draft saw every token before it."""
    model = with_block(tiny.endless(tiny_llama), 1, 0.05)
    prompt = text(1, 6)
    output = layerskip.generate(
        model, prompt, exit_layer=1, max_new_tokens=64, do_sample=False, return_dict_in_generate=True, **WAYS[way]
    )
    if way == "chain":
        labels = output.sequences.clone()
        labels[:, :6] = -100
        measured = measure_exits(model, [{"input_ids": output.sequences, "labels": labels}], [1])
        foretold = measured[1].mean_acceptance_length(3)
        assert output.statistics.mean_acceptance_length == pytest.approx(foretold, rel=0.1)
    again = layerskip.generate(model, prompt, exit_layer=1, max_new_tokens=64, do_sample=False, **WAYS[way])
    assert torch.equal(again, output.sequences)


def test_a_cache_that_others_decoded_with_is_made_fit(tiny_llama):
    """Plain decoding in between leaves the block behind: what it has not seen is computed again."""
    model, prompt = with_block(tiny.endless(tiny_llama)), text(1, 6)
    cache = RollbackCache(4)
    keywords = {"do_sample": False, "cache": cache}
    first = layerskip.generate(model, prompt, exit_layer=2, max_new_tokens=6, **keywords)
    second = layerskip.generate(model, first, exit_layer=None, max_new_tokens=6, **keywords)
    assert not cache.blocks
    third = layerskip.generate(model, second, exit_layer=2, max_new_tokens=6, **keywords)
    assert torch.equal(third, model.generate(prompt, do_sample=False, max_new_tokens=18))
    assert [layer.length for layer in cache.blocks[2]] == [cache.length] * 2
    alone = layerskip.generate(model, third, exit_layer=1, max_new_tokens=4, **keywords)
    assert torch.equal(alone, model.generate(prompt, do_sample=False, max_new_tokens=22))


def test_a_sample_is_the_plain_loops_with_the_same_noise(tiny_llama):
    model, (ids, mask) = with_block(tiny_llama), batch()
    kwargs = {"do_sample": True, "temperature": 1.3, "acceptance": "coupled", "seed": 3}
    plain = decoded(model, ids, mask, exit_layer=None, **kwargs)
    assert torch.equal(decoded(model, ids, mask, num_draft_tokens=3, **kwargs), plain)
    assert torch.equal(decoded(model, ids, mask, exit_layer="auto", num_draft_tokens="auto", **kwargs), plain)


def test_auto_keeps_to_the_exit_that_has_a_block(tiny_llama):
    """Another exit would draft tokens that the block never sees."""
    prepare(tiny_llama, Recipe(exits=(1, 2), adapter_blocks=1, max_dropout=0))
    assert len(known_exits(tiny_llama)) == 1


def test_only_the_block_learns_and_the_checkpoint_carries_it(tmp_path):
    original = tiny.llama()
    model = copy.deepcopy(original)
    handle = prepare(model.train(), RECIPE)
    before = measure_exits(model, [text()], [1])[1].overlap
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for step in range(60):
        handle.set_step(step)
        model(input_ids=text(), labels=text()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert all(torch.equal(weight, original.get_parameter(name)) for name, weight in plain.named_parameters())
    assert isinstance(adapter_at(plain, 1), ExitBlocks)
    assert measure_exits(plain, [text()], [1])[1].overlap > before + 0.05
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in adapter_at(half, 1).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("own_text", [False, True])
def test_layers_that_a_frozen_targets_exits_do_not_need_are_not_run(own_text):
    """Loss and gradient are those of the exit; the layers above it cost nothing."""
    model = tiny.llama()
    recipe = Recipe.preset("frozen-target", adapter_blocks=1, self_distillation=1.0 if own_text else 0.0)
    handle = prepare(model.train(), recipe)
    ran = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    handle.set_step(0, own_text=own_text)
    loss = model(input_ids=text(), labels=text()).loss
    loss.backward()
    assert set(ran) == {0}
    logits = dict(ExitReader(model.eval(), [1]).read(text())[1])[1]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text()[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert all(weight.grad is not None for weight in handle.adapters.parameters())
    assert set(ran) == {0, 1, 2, 3}  # evaluation runs them all
    assert "forward" not in vars(model.model.layers[2])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3", "phi3"])
def test_the_draft_is_a_model_whose_last_layers_are_the_blocks(name, tmp_path):
    model = with_block(tiny.architecture(name))
    draft = export_draft(model, 2, tmp_path)
    assert draft.config.get_text_config(decoder=True).num_hidden_layers == 4
    expected = dict(ExitReader(model, [2]).read(text())[1])[2]
    torch.testing.assert_close(draft(input_ids=text()).logits, expected, atol=1e-4, rtol=1e-3)


def test_two_kinds_of_adapter_are_one_too_many():
    with pytest.raises(ValueError, match="set one of them"):
        Recipe(adapter_blocks=1, adapter_rank=8)
    with pytest.raises(ValueError, match="adapter_blocks"):
        Recipe(freeze_model=True)
    assert Recipe.preset("frozen-target", adapter_rank=8).adapter_blocks is None


def test_more_blocks_than_layers_are_told_before_anything_is_copied(tiny_llama):
    with pytest.raises(ValueError, match="of which this model has 2: take fewer"):
        prepare(tiny_llama, Recipe(exits=(2,), adapter_blocks=3))


def test_a_layer_that_cannot_be_copied_is_refused():
    with torch.device("meta"):
        model = tiny.llama()
    with pytest.raises(UnsupportedModelError, match="floating-point dtype"):
        attach_adapters(model, [2], blocks=1)


@pytest.mark.parametrize("recipe", [{}, {"exits": (1, 2), "adapter_blocks": 2, "curriculum": "all"}])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "falcon"])
def test_a_cache_that_training_makes_is_not_the_blocks(name, recipe):
    """Models make one unless told not to (`use_cache`): the blocks would find the keys of the layers they replace."""
    handle = prepare(tiny.architecture(name).train(), Recipe.preset("frozen-target", **recipe))
    with torch.no_grad():
        for weight in handle.adapters.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    losses = []
    for use_cache in (True, False):
        handle.model(input_ids=text(), labels=text(), use_cache=use_cache)
        losses.append(handle.losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("removed", [False, True])
def test_an_interrupted_forward_leaves_no_layer_out(removed, tiny_llama):
    """Not even one that raises what hooks do not hear of, as a notebook's stop button does."""
    expected = tiny_llama(input_ids=text(1)).logits
    handle = prepare(tiny_llama.train(), Recipe.preset("frozen-target", adapter_blocks=1, self_distillation=0.0))

    def stop(*_):
        raise KeyboardInterrupt

    hook = tiny_llama.model.norm.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        tiny_llama(input_ids=text(), labels=text())
    hook.remove()
    if removed:
        handle.remove()
        assert all("forward" not in vars(layer) for layer in tiny_llama.model.layers)
    stages = Stages(tiny_llama.eval(), None)  # whose views know nothing of the model's hooks
    torch.testing.assert_close(stages.verify(text(1), None, stages.new_cache()), expected)


def test_a_cache_that_transformers_used_is_made_fit(tiny_llama):
    """Its own forward adds positions that the block has not seen, `crop` and `reset` take them from all layers."""
    model, prompt = with_block(tiny.endless(tiny_llama)), text(1, 6)
    cache = RollbackCache(4)
    keywords = {"exit_layer": 2, "do_sample": False, "cache": cache, "max_new_tokens": 6}
    first = layerskip.generate(model, prompt, **keywords)
    cache.crop(-3)
    assert {layer.length for layer in [*cache.layers, *cache.blocks[2]]} == {8}
    layerskip.generate(model, first, **keywords)
    longer = torch.cat([first, text(1, 2)], dim=1)
    cache.rollback(11)
    with torch.no_grad():
        Stages(model, None).run(model, longer[:, 11:13], cache, 0)
    again = layerskip.generate(model, longer, **keywords)
    assert torch.equal(again, model.generate(longer, do_sample=False, max_new_tokens=6))
    assert [layer.length for layer in cache.blocks[2]] == [cache.length] * 2 == [len(again[0]) - 1] * 2
    cache.reset()
    assert torch.equal(layerskip.generate(model, prompt, **keywords), first)


def test_blocks_that_were_loaded_keep_what_their_layers_keep_in_float32(tmp_path):
    model = with_block(tiny.architecture("deepseek_v3"), 1)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer, block = half.model.layers[1], adapter_at(half, 1).layers[0]
    dtypes = {name: value.dtype for name, value in layer.state_dict().items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert {name: value.dtype for name, value in block.state_dict().items()} == dtypes
    assert {value.dtype for value in adapter_at(half.double(), 1).state_dict().values()} == {torch.float64}


@pytest.mark.parametrize(
    "adapters",
    [{"blocks": n, "exits": [1]} for n in (0, -1, "x", 2.0, True, None)]
    + [{"blocks": 1, "exits": exits} for exits in ("x", None, [], [0], [4], ["1"])]
    + [{"blocks": 1, "rank": 2, "exits": [1]}, {"rank": -4, "exits": [1]}, {"blocks": 1}, "x"],
)
def test_a_config_that_names_no_adapters_is_told(adapters, tmp_path):
    model = with_block(tiny.llama(), 1, blocks=1)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.config.layerskip = {"adapters": adapters}
    with pytest.raises(ValueError, match=r"says layerskip\.adapters=.* as they were saved"):
        adapter_at(loaded, 1)
