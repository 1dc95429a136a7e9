"""The recipe by the paper's numbers, and what hanging it on a model does to outputs, losses and gradients."""

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from layerskip.forecast import measure_exits
from layerskip.model.adapters import ADAPTERS_FILE, adapters_of
from layerskip.model.anatomy import decoder_layers
from layerskip.training.callback import RecipeCallback
from layerskip.training.curriculum import active_exits, gradual, rotational
from layerskip.training.dropout import Decision, DropoutHooks, dropout_rates, keep_decisions
from layerskip.training.loss import exit_scale, exit_weights
from layerskip.training.presets import PRESETS
from layerskip.training.recipe import Recipe, prepare
from tests import tiny

# --- formulas, against the paper's (arXiv 2404.16710, 4.1) written out, and test vectors as they are printed ---


def test_dropout_rates_of_the_paper():
    rates = dropout_rates(Recipe(max_dropout=0.2), 32, step=0)
    assert rates[0] == 0
    assert rates == pytest.approx([0.2 * (math.exp(l * math.log(2) / 31) - 1) for l in range(32)], abs=1e-6)
    assert rates[31] == pytest.approx(0.2, abs=1e-12)
    mean_depth = (2 ** (32 / 31) - 1) / (2 ** (1 / 31) - 1) / 32 - 1  # a geometric series
    assert sum(rates) / 32 == pytest.approx(0.2 * mean_depth, abs=1e-6)
    assert (round(mean_depth, 4), round(sum(rates) / 32, 4)) == (0.4445, 0.0889)  # the second: the paper's ablation


def test_dropout_depth_linear():
    assert dropout_rates(Recipe(max_dropout=0.6, dropout_depth="linear"), 4, 0) == pytest.approx([0, 0.2, 0.4, 0.6])


def test_dropout_over_time():
    for name, first, middle, last in (
        ("constant", 1, 1, 1),
        ("rising", 0, 2**0.5 - 1, 1),
        ("falling", 1, 0.5, 0),
    ):
        recipe = Recipe(max_dropout=0.4, dropout_time=name, total_steps=101)
        scales = [dropout_rates(recipe, 8, step)[-1] / 0.4 for step in (0, 50, 100)]
        assert scales == pytest.approx([first, middle, last])


def test_exit_scales_of_the_paper():
    recipe = Recipe.preset("paper-continual")
    scales = [exit_scale(recipe, l + 1, 32) for l in (0, 8, 16, 24, 30, 31)]
    assert scales == pytest.approx([0, 7.2, 27.2, 60, 93, 124], abs=1e-9)
    assert exit_scale(Recipe(exit_loss_scale=1.0, exit_weights="paper"), 32, 32) == pytest.approx(496)


def test_exit_weights_of_the_paper():
    recipe = Recipe.preset("paper-continual")
    active = active_exits(recipe, 32, step=0)
    assert [e - 1 for e in active] == [0, 8, 16, 24, 31]
    weights = exit_weights(recipe, active, 32)
    scales = [0.2 * sum(range(l + 1)) for l in (0, 8, 16, 24)] + [31 + 0.2 * sum(range(31))]
    assert list(weights.values()) == pytest.approx([scale / sum(scales) for scale in scales], abs=1e-6)
    assert [round(weight, 4) for weight in weights.values()] == [0, 0.0330, 0.1245, 0.2747, 0.5678]
    full = exit_weights(Recipe.preset("paper-continual", exit_loss_scale=1.0), active, 32)
    assert full[32] == pytest.approx(496 / (36 + 136 + 300 + 496), abs=1e-9)
    assert round(full[32], 3) == 0.512


def test_exit_weights_always_sum_to_one():
    for scale in (0.0, 0.2, 1.0):
        for kind in ("paper", "uniform", "shallow"):
            for step in range(9):
                recipe = Recipe(exit_loss_scale=scale, exit_weights=kind)
                weights = exit_weights(recipe, active_exits(recipe, 12, step), 12)
                assert sum(weights.values()) == pytest.approx(1)
    only_first = Recipe(exits=(1,), include_last=False)
    assert exit_weights(only_first, active_exits(only_first, 12, 0), 12) == {1: 1.0}  # the paper's e(0) is 0


def test_rotation_visits_every_exit_once_in_a_stride():
    candidates = tuple(range(1, 25))
    for stride in (1, 5, 8, 23, 24):
        seen = [e for step in range(7, 7 + stride) for e in rotational(candidates, stride, step)]
        assert sorted(seen) == list(candidates)
        assert max(len(rotational(candidates, stride, s)) for s in range(stride)) == -(-24 // stride)


def test_gradual_goes_from_deep_to_shallow():
    candidates, total = tuple(range(1, 9)), 160
    assert gradual(candidates, 0, total) == (8,)
    assert gradual(candidates, 10, total) == (7, 8)
    assert gradual(candidates, 80, total) == candidates == gradual(candidates, 159, total)
    assert gradual(candidates, 69, total) == candidates[1:]


def test_the_last_layer_is_always_in_the_loss_unless_switched_off():
    for curriculum in ("rotational", "gradual", "all"):
        for step in range(20):
            recipe = Recipe(curriculum=curriculum, total_steps=20, exits=(2, 3))
            assert active_exits(recipe, 6, step)[-1] == 6
    assert 6 not in active_exits(Recipe(exits=(2, 3), include_last=False), 6, 0)


def test_a_frozen_target_trains_its_deepest_exit_where_the_rotation_has_the_last_layer():
    recipe = Recipe(max_dropout=0, adapter_rank=4, freeze_model=True, exit_weights="uniform", curriculum_stride=8)
    seen = [active_exits(recipe, 6, step) for step in range(6)]
    assert seen == [(1,), (2,), (3,), (4,), (5,), (5,)]


# --- dropout decisions ---


def test_decisions_do_not_depend_on_how_the_batch_is_shared():
    rates = (0.0, 0.3, 0.6)
    whole = keep_decisions(rates, 8, seed=1, step=5, first_row=0)
    halves = [keep_decisions(rates, 4, 1, 5, first) for first in (0, 4)]
    assert torch.equal(whole, torch.cat(halves, dim=1))


def test_decisions_differ_by_seed_step_and_row_and_follow_the_rates():
    rates = (0.0, 0.25, 0.75)
    base = keep_decisions(rates, 4000, 1, 5, 0)
    for other in ((2, 5, 0), (1, 6, 0), (1, 5, 4000)):
        assert not torch.equal(base, keep_decisions(rates, 4000, *other))
    assert base.float().mean(1).tolist() == pytest.approx([1.0, 0.75, 0.25], abs=0.03)


def test_decisions_per_batch_are_one_for_all_rows_and_processes():
    rates = (0.0, 0.5, 0.5)
    seen = set()
    for step in range(20):
        keep = keep_decisions(rates, 4, 1, step, first_row=0, per="batch")
        assert torch.equal(keep, keep[:, :1].expand(3, 4))
        assert torch.equal(keep, keep_decisions(rates, 4, 1, step, first_row=4, per="batch"))
        seen.add(tuple(keep[:, 0].tolist()))
    assert len(seen) == 4
    assert all(keep[0] for keep in seen)


# --- presets ---


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_models_of_every_depth(name):
    for num_layers in (3, 4, 16, 24, 32, 80):
        recipe = Recipe.preset(name, total_steps=100)
        recipe.check(num_layers)
        exits = {e for step in range(100) for e in active_exits(recipe, num_layers, step)}
        assert exits <= set(range(1, num_layers + 1))
        assert (num_layers in exits) == (not recipe.freeze_model)
        assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_presets_are_the_papers_numbers():
    continual, scratch = Recipe.preset("paper-continual"), Recipe.preset("paper-scratch", total_steps=10)
    assert dropout_rates(continual, 32, 0)[-1] == pytest.approx(0.1)
    assert [e - 1 for e in active_exits(continual, 32, 0)] == [0, 8, 16, 24, 31]
    assert dropout_rates(scratch, 24, 0) == (0,) * 24
    assert dropout_rates(scratch, 24, 9)[-1] == pytest.approx(0.1)
    assert [len(active_exits(scratch, 24, step)) for step in range(4)] == [2, 2, 2, 2]  # R = 23, and the last
    assert Recipe.preset("paper-continual", exit_loss_scale=0.1).exit_loss_scale == 0.1
    for recipe in (continual, scratch, Recipe.preset("paper-finetune"), Recipe.preset("paper-finetune-task")):
        assert (recipe.exit_loss_positions, recipe.self_distillation) == (1, 0)
    assert Recipe.preset("self-distill") == Recipe()
    with pytest.raises(ValueError, match="preset='paper'"):
        Recipe.preset("paper")


def test_shallow_exits_are_a_twelfth_and_an_eighth_of_the_depth():
    recipe = Recipe(exit_weights="shallow", exit_loss_scale=0.5)
    assert [recipe.trained_exits(n) for n in (2, 4, 16, 24, 30, 32)] == [(1,), (1,), (2,), (2, 3), (3, 4), (3, 4)]
    assert exit_scale(recipe, 1, 24) == 0.5
    assert exit_scale(recipe, 23, 24) == pytest.approx(0.5 / 23)
    assert exit_scale(recipe, 24, 24) == 1


# --- on a model ---


def batch(rows: int = 4, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_no_dropout_and_no_exits_is_plain_training_bit_for_bit(tiny_llama):
    ids, plain = batch(), copy.deepcopy(tiny_llama).train()
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    prepare(tiny_llama, Recipe(max_dropout=0, exit_loss_scale=0, exit_weights="uniform"))
    actual = tiny_llama.train()(input_ids=ids, labels=ids).loss
    actual.backward()
    assert torch.equal(actual, expected)
    theirs = gradients(plain)
    assert all(torch.equal(grad, theirs[name]) for name, grad in gradients(tiny_llama).items())


def test_evaluation_is_the_models_own(tiny_llama):
    ids = batch()
    expected = tiny_llama(input_ids=ids, labels=ids)
    prepare(tiny_llama, Recipe(max_dropout=1.0))
    actual = tiny_llama(input_ids=ids, labels=ids)
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(actual.logits, expected.logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "opt-projected", "falcon", "bloom", "mixtral"])
def test_dropped_rows_equal_the_model_without_that_layer(name):
    """Row by row: a sample sees exactly the layers it was not dropped from."""
    model, ids = tiny.architecture(name), batch()
    handle = prepare(model, Recipe(max_dropout=0.5, dropout_depth="linear", seed=3))
    handle.set_step(2)
    model.train()
    for module in model.modules():  # the architecture's own dropout aside
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "hidden_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    logits = model(input_ids=ids).logits
    keep = keep_decisions(handle.dropout_rates, 4, 3, 2, 0)
    assert not keep.all()
    handle.remove()
    model.eval()
    layers = decoder_layers(model)
    for row in range(4):
        hooks = [layer.register_forward_hook(_skip) for index, layer in enumerate(layers) if not keep[index, row]]
        with torch.no_grad():
            expected = model(input_ids=ids[row : row + 1]).logits
        [hook.remove() for hook in hooks]
        torch.testing.assert_close(logits[row : row + 1], expected, atol=1e-4, rtol=1e-4)


def _skip(layer, args, output):
    return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]


class Adds(torch.nn.Module):
    """A layer that adds its rows' numbers to them."""

    def forward(self, hidden_states, rows=None):
        return hidden_states + rows[:, :, None]


@pytest.mark.parametrize("keep", [(1, 0, 1, 1), (0, 0, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_rescaled_layers_contribute_more_to_the_rows_that_keep_them(keep, scale):
    layer, x, added = Adds().train(), torch.randn(4, 3, 5), torch.arange(1.0, 5.0)
    DropoutHooks(layer, lambda rows: Decision(torch.tensor(keep, dtype=torch.bool), scale))
    expected = x + scale * (torch.tensor(keep) * added)[:, None, None]
    torch.testing.assert_close(layer(x, rows=added[:, None]), expected)
    assert torch.equal(layer.eval()(x, rows=added[:, None]), x + added[:, None, None])  # evaluation: neither


def test_rescaling_is_by_the_layers_own_keep_rate(tiny_llama):
    handle = prepare(tiny_llama, Recipe(max_dropout=0.6, dropout_depth="linear", dropout_rescale=True))
    handle.set_step(0)
    assert handle._decide(0, 4) is None
    assert [handle._decide(l, 4).scale for l in (1, 2, 3)] == pytest.approx([1 / 0.8, 1 / 0.6, 1 / 0.4])


@pytest.mark.filterwarnings("ignore:a training forward whose loss")
def test_dropped_samples_cost_no_compute(tiny_llama):
    """The layer sees only the rows that stay."""
    handle = prepare(tiny_llama, Recipe(max_dropout=0.5, dropout_depth="linear"))
    rows: list[int] = []
    tiny_llama.model.layers[3].mlp.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    tiny_llama.train()
    for step in range(12):
        handle.set_step(step)
        tiny_llama(input_ids=batch(8))
        kept = int(keep_decisions(handle.dropout_rates, 8, 0, step, 0)[3].sum())
        assert rows[-1] == max(kept, 1)
    assert min(rows) < 8


@pytest.mark.filterwarnings("ignore:a training forward whose loss")
def test_padding_masks_follow_their_rows(tiny_llama):
    ids = batch()
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :2] = 0
    handle = prepare(tiny_llama, Recipe(max_dropout=0.5, dropout_depth="linear", seed=3))
    handle.set_step(2)
    together = tiny_llama.train()(input_ids=ids, attention_mask=mask).logits
    for row in range(4):
        handle.set_step(2, first_row=row)
        alone = tiny_llama(input_ids=ids[row : row + 1], attention_mask=mask[row : row + 1]).logits
        real = mask[row].bool()
        torch.testing.assert_close(together[row][real], alone[0][real], atol=1e-4, rtol=1e-4)


def test_all_rows_dropped_is_the_model_without_that_layer_and_keeps_every_gradient(tiny_llama):
    prepare(tiny_llama, Recipe(max_dropout=1.0, dropout_depth="linear", exits=(1,)))
    tiny_llama.train()(input_ids=batch(), labels=batch()).loss.backward()
    last = tiny_llama.model.layers[3]
    assert all(p.grad is not None and not p.grad.any() for p in last.parameters())


def test_the_loss_is_the_weighted_sum_of_the_exits_losses(tiny_llama):
    ids = batch()
    with torch.no_grad():
        expected = {e: _cross_entropy(_truncated(tiny_llama, e)(input_ids=ids).logits, ids) for e in (1, 2, 3, 4)}
    recipe = Recipe.preset("paper-continual", max_dropout=0, exit_loss_scale=0.5, curriculum="all")
    handle = prepare(tiny_llama, recipe)
    loss = tiny_llama.train()(input_ids=ids, labels=ids).loss
    weights = exit_weights(recipe, (1, 2, 3, 4), 4)
    assert loss.item() == pytest.approx(sum(weights[e] * expected[e].item() for e in weights), abs=1e-5)
    assert weights.pop(1) == 0  # the paper's e(0); the others' losses are reported
    assert {e: v.item() for e, v in handle.losses.items()} == pytest.approx(
        {e: expected[e].item() for e in weights}, abs=1e-5
    )


def _truncated(model, exit_layer):
    copied = copy.deepcopy(model)
    del copied.model.layers[exit_layer:]
    copied.config.num_hidden_layers = exit_layer
    return copied


def _cross_entropy(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_self_distillation_does_not_move_the_last_layer(tiny_llama):
    """The teacher is detached: with the last layer out of the loss, layers above the exit get no gradient."""
    recipe = Recipe(max_dropout=0, exits=(2,), curriculum="all", include_last=False, self_distillation=1.0)
    prepare(tiny_llama, recipe)
    tiny_llama.train()(input_ids=batch(), labels=batch()).loss.backward()
    assert all(p.grad is None for p in tiny_llama.model.layers[2:].parameters())
    assert all(p.grad.any() for p in tiny_llama.model.layers[1].parameters())


def test_on_its_own_text_only_the_exits_learn_and_only_from_the_model(tiny_llama):
    recipe = Recipe(
        max_dropout=0,
        exits=(1, 2),
        curriculum="all",
        exit_weights="uniform",
        exit_loss_positions=1,
        self_distillation=0,
    )
    handle = prepare(tiny_llama, recipe)
    tiny_llama.train()
    handle.set_step(0, own_text=True)
    assert handle.active_exits == (1, 2)
    loss = tiny_llama(input_ids=batch(), labels=batch()).loss
    loss.backward()
    assert all(p.grad is None for p in tiny_llama.model.layers[2:].parameters())
    with torch.no_grad():
        logits = tiny_llama(input_ids=batch()).logits
        early = _truncated(tiny_llama.eval(), 2)(input_ids=batch()).logits
    expected = -(logits[:, :-1].softmax(-1) * early[:, :-1].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(handle.losses[2], expected)
    handle.set_step(1)
    assert handle.active_exits == (1, 2, 4)


def test_on_own_text_some_exit_learns_where_the_rotation_has_the_last_layer(tiny_llama):
    handle = prepare(tiny_llama, Recipe(exit_weights="uniform", curriculum_stride=4))
    for step in range(8):
        handle.set_step(step, own_text=True)
        assert set(handle.active_exits) in ({1}, {2}, {3})


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_accumulated_gradients_equal_the_whole_batchs(tiny_llama, share):
    """Four micro-batches with unequal numbers of labels, divided by the window's items, are one batch of four."""
    ids = batch(4)
    labels = ids.clone()
    labels[0, 2:] = labels[1, 5:] = -100
    items = int((labels[:, 1:] != -100).sum())
    recipe = Recipe(max_dropout=0.5, dropout_depth="linear", curriculum="all", exits=(1, 3), self_distillation=share)
    handle = prepare(tiny_llama, recipe)
    tiny_llama.train()
    handle.set_step(3)
    tiny_llama(input_ids=ids, labels=labels, num_items_in_batch=items).loss.backward()
    whole = gradients(tiny_llama)
    tiny_llama.zero_grad()
    for row in range(4):
        handle.set_step(3, first_row=row)
        one = slice(row, row + 1)
        tiny_llama(input_ids=ids[one], labels=labels[one], num_items_in_batch=items).loss.backward()
    for name, grad in gradients(tiny_llama).items():
        torch.testing.assert_close(grad, whole[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(tiny_llama, use_reentrant):
    ids, other = batch(), copy.deepcopy(tiny_llama)
    results = []
    for model, checkpointing in ((tiny_llama, False), (other, True)):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        handle = prepare(model, Recipe(max_dropout=0.5, dropout_depth="linear", curriculum="all", exits=(1, 2)))
        handle.set_step(4)
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for name, grad in results[0][1].items():
        torch.testing.assert_close(grad, results[1][1][name], atol=1e-5, rtol=1e-4)


def test_untold_each_training_forward_is_a_step(tiny_llama):
    recipe = Recipe(max_dropout=0, curriculum_stride=3, exits=(1, 2, 3), exit_weights="uniform")
    handle = prepare(tiny_llama, recipe)
    tiny_llama.train()
    seen = []
    for _ in range(4):
        tiny_llama(input_ids=batch(), labels=batch())
        seen.append(tuple(handle.losses))
    assert seen == [(1, 4), (2, 4), (3, 4), (1, 4)]


def test_training_pulls_the_exits_towards_the_model(tiny_llama):
    """The point of it all: after a few steps on a small text, the trained exits agree with the model."""
    ids = batch(4, 16)
    before = measure_exits(tiny_llama, [ids])
    handle = prepare(tiny_llama, Recipe(max_dropout=0.1, exits=(1, 2), curriculum_stride=2, exit_weights="uniform"))
    optimizer = torch.optim.AdamW(tiny_llama.train().parameters(), lr=3e-3)
    for step in range(40):
        handle.set_step(step)
        loss = tiny_llama(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = measure_exits(tiny_llama, [ids])
    for exit_layer in (1, 2):
        assert after[exit_layer].loss < 1.0 < before[exit_layer].loss
        assert after[exit_layer].agreement > 0.9 > before[exit_layer].agreement


def test_the_recipe_travels_in_the_checkpoint(tiny_llama, tmp_path):
    recipe = Recipe(max_dropout=0.3, exits=(1, 3))
    prepare(tiny_llama, recipe)
    tiny_llama.save_pretrained(tmp_path / "a")
    again = type(tiny_llama).from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    carried = type(tiny_llama).from_pretrained(tmp_path / "b").config.layerskip["recipe"]
    assert Recipe.from_dict(carried) == recipe
    assert set(again.state_dict()) == set(tiny_llama.state_dict())


def test_remove_takes_everything_off(tiny_llama):
    ids, plain = batch(), copy.deepcopy(tiny_llama).train()
    prepare(tiny_llama, Recipe(max_dropout=0.9)).remove()
    assert torch.equal(tiny_llama.train()(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss)
    prepare(tiny_llama, Recipe())  # and another may come
    with pytest.raises(ValueError, match=r"handle\.remove"):
        prepare(tiny_llama, Recipe())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_dropout": 1.5}, "max_dropout=1.5"),
        ({"exit_loss_scale": -1}, "exit_loss_scale=-1"),
        ({"curriculum": "rotating"}, "rotational, gradual, all"),
        ({"curriculum_stride": 0}, "curriculum_stride=0"),
        ({"exits": ()}, "exits is empty"),
        ({"self_distillation": 2}, "self_distillation=2"),
        ({"exits": 2}, r"exits=2 is no list of whole numbers: write it as \(1, 2\)"),
        ({"exits": "12"}, "exits='12' is no list"),
        ({"exits": (1.5,)}, "is no list"),
        ({"max_dropout": "0.1"}, "max_dropout='0.1' is not a number"),
        ({"adapter_rank": 2.5, "max_dropout": 0}, "adapter_rank=2.5 is not a whole number"),
        ({"distillation_temperature": 1e-320}, "distillation_temperature=1e-320 is out of range: 0.01 to 100"),
        ({"freeze_model": "false"}, "freeze_model='false' is neither True nor False"),
        ({"max_dropout": True}, "max_dropout=True is not a number"),
        ({"exit_loss_positions": 0}, "exit_loss_positions=0 is out of range: above 0 to 1"),
        ({"exit_loss_scale": float("inf")}, "exit_loss_scale=inf is out of range: 0 to 1000"),
    ],
)
def test_bad_recipes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**arguments)


def test_recipes_that_do_not_fit_the_model_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="choose from 1 to 3"):
        prepare(tiny_llama, Recipe(exits=(2, 4)))
    with pytest.raises(ValueError, match="total_steps"):
        prepare(tiny_llama, Recipe(curriculum="gradual"))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"exits": (1,), "exit_weights": "paper"}, "gives exit 1 no weight"),
        ({"exits": (1, 2), "exit_weights": "paper", "adapter_rank": 4}, "gives exit 1 no weight"),
        (
            {"exits": (1, 2), "exit_loss_scale": 0, "adapter_rank": 4},
            "exit_loss_scale=0 lets the exits' adapters learn",
        ),
    ],
)
def test_what_would_learn_nothing_is_refused(tiny_llama, recipe, message):
    with pytest.raises(ValueError, match=message):
        prepare(tiny_llama, Recipe(**recipe))


def test_fewer_exits_than_the_stride_are_on_in_turn():
    """Rather than one of them now and then, and at most steps none."""
    one = Recipe(exits=(3,), curriculum_stride=8)
    two = Recipe(exits=(2, 3), curriculum_stride=8)
    assert [active_exits(one, 8, step) for step in range(3)] == [(3, 8)] * 3
    assert [active_exits(two, 8, step) for step in range(3)] == [(2, 8), (3, 8), (2, 8)]


def test_recipe_needs_no_torch():
    code = "import sys, layerskip.training.recipe, layerskip.training.curriculum; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_in_transformers_trainer_the_step_is_the_trainers(tmp_path):
    """Through gradient accumulation and a resume, which then ends where an unbroken run ends."""
    data = [{"input_ids": row, "labels": row} for row in batch(32)]

    def run(folder, resume=None, max_steps=6):
        model = tiny.llama().train()
        recipe = Recipe(max_dropout=0.5, dropout_time="rising", total_steps=6, exits=(1, 2), curriculum_stride=2)
        handle = prepare(model, recipe)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=max_steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=3,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[RecipeCallback(handle)])
        trainer.train(resume_from_checkpoint=resume)
        return model, handle

    whole, handle = run(tmp_path / "whole")
    assert handle._at[:2] == (5, 2)  # the second of two micro-steps of two rows
    resumed, handle = run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-3"))
    assert handle._at.step == 5
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter, resumed.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_training_without_the_recipes_loss_is_said(tiny_llama):
    prepare(tiny_llama, Recipe())
    tiny_llama.train()(input_ids=batch())
    with pytest.warns(UserWarning, match="compute_loss_func"):
        tiny_llama(input_ids=batch())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_loss_may_be_asked_for_after_the_forward(name):
    """As Trainers with a compute_loss_func do; in evaluation it is the model's own."""
    ids = batch()
    labels = ids.clone()
    labels[1, 4:] = -100
    model = tiny.architecture(name)
    handle = prepare(model, Recipe(exits=(1, 2), curriculum="all", exit_weights="uniform", self_distillation=0.5))
    for mode in (True, False):
        model.train(mode)
        arguments = {"output_router_logits": True} if name == "mixtral" else {}
        handle.set_step(3)
        told = model(input_ids=ids, labels=labels, num_items_in_batch=20, **arguments).loss
        handle.set_step(3)
        asked = handle.compute_loss(model(input_ids=ids, **arguments), labels, num_items_in_batch=20)
        torch.testing.assert_close(asked, told)


@pytest.mark.parametrize("num_items", [None, 0])
def test_a_batch_without_labels_has_no_loss_rather_than_nan(tiny_llama, num_items):
    handle = prepare(tiny_llama, Recipe(exits=(1, 2), curriculum="all"))
    ids, nothing = batch(), torch.full_like(batch(), -100)
    outputs = tiny_llama.train()(input_ids=ids)
    for loss in (
        handle.compute_loss(outputs, nothing, num_items_in_batch=num_items),
        tiny_llama(input_ids=ids, labels=nothing, num_items_in_batch=num_items).loss,
    ):
        assert loss == 0
    loss.backward()
    assert all(not weight.grad.any() for weight in tiny_llama.parameters())


@pytest.mark.slow
def test_in_trl(tmp_path):
    """SFTTrainer computes its own loss unless it is given the recipe's: the exits learn, at the trainer's steps."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = tiny.llama(vocab_size=300).train()
    handle = prepare(model, Recipe(max_dropout=0.5, exits=(1, 2), curriculum_stride=2, exit_weights="uniform"))
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_length=32,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    text = Dataset.from_list([{"text": "def add(a, b):\n    return a + b"}] * 16)
    ids = torch.tensor([tiny.tokenizer()(text[0]["text"]).input_ids])
    before = measure_exits(model, [ids])
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=text,
        processing_class=tiny.tokenizer(),
        compute_loss_func=handle.compute_loss,
        callbacks=[RecipeCallback(handle)],
    )
    trainer.train()
    assert handle._at[:2] == (2, 2)
    assert tuple(handle.losses) == (1, 4)
    after = measure_exits(model, [ids])
    assert all(after[exit_layer].loss < before[exit_layer].loss - 0.1 for exit_layer in (1, 2))


KINDS = pytest.mark.parametrize("adapters", [{"adapter_rank": 4}, {"adapter_blocks": 1}])


def frozen_trainer(folder: Path, adapters: dict, **arguments) -> Trainer:
    """transformers' Trainer for four steps of a frozen target, in `folder`."""
    handle = prepare(tiny.llama(), Recipe.preset("frozen-target", **adapters))
    ids = torch.randint(3, 64, (8, 8), generator=torch.Generator().manual_seed(1))
    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "report_to": []} | arguments
    data = [{"input_ids": row, "labels": row} for row in ids]
    settings = TrainingArguments(folder, disable_tqdm=True, **settings)
    return Trainer(handle.model, settings, train_dataset=data, eval_dataset=data, callbacks=[RecipeCallback(handle)])


def assert_same_adapters(first, second):
    first, second = (adapters_of(model).state_dict() for model in (first, second))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@KINDS
def test_a_trainers_checkpoints_carry_the_adapters(adapters, tmp_path):
    """And a run that is resumed from one ends where the whole one did; elsewhere it would begin anew."""
    whole = frozen_trainer(tmp_path / "run", adapters)
    whole.train()
    assert_same_adapters(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4"), whole.model)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    resumed = frozen_trainer(tmp_path / "run", adapters)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_adapters(resumed.model, whole.model)
    with pytest.raises(FileNotFoundError, match="the exits would begin anew: copy it there"):
        frozen_trainer(tmp_path / "elsewhere", adapters).train(resume_from_checkpoint=checkpoint)


@KINDS
def test_whatever_saves_the_model_saves_its_adapters(adapters, tmp_path):
    trainer = frozen_trainer(tmp_path / "run", adapters, save_strategy="no")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    trainer.model.save_pretrained(tmp_path / "by-hand")
    copy.deepcopy(trainer.model.eval()).save_pretrained(tmp_path / "copied")
    for folder in ("saved", "by-hand", "copied"):
        assert_same_adapters(AutoModelForCausalLM.from_pretrained(tmp_path / folder), trainer.model)
    trainer.model._layerskip_handle.remove()
    prepare(trainer.model.requires_grad_(True), Recipe())  # which has none, and neither has what is saved now
    trainer.model.save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without" / ADAPTERS_FILE).exists()


def test_the_best_model_has_the_best_adapters(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}  # of equals the first is best
    trainer = frozen_trainer(tmp_path, {"adapter_rank": 4}, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert_same_adapters(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2"), trainer.model)
