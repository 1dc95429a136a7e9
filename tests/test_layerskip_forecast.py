"""Forecasts against decoding itself, and the cost model against closed forms."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import layerskip
from layerskip.exact.acceptance import accept_sampled, walk_sampled
from layerskip.forecast import (
    Bookkeeping,
    Costs,
    ExitMeasurement,
    TreeCosts,
    best_setting,
    cycle,
    measure_bookkeeping,
    measure_costs,
    measure_exits,
    paper_costs,
)
from layerskip.forecast.agreement import sibling_chances
from layerskip.forecast.walk import dynamic_ends, mean_acceptance_length
from layerskip.model.tree import parse_shape
from tests import tiny


def measurement(agrees: list[bool]) -> ExitMeasurement:
    m = ExitMeasurement(num_tokens=len(agrees))
    m._agrees.append(torch.tensor(agrees))
    return m


def test_acceptance_length_walks_the_text_as_decoding_does():
    always, never = measurement([True] * 100), measurement([False] * 100)
    for n in (1, 3, 6):
        assert always.mean_acceptance_length(n) == n + 1
        assert never.mean_acceptance_length(n) == 1
    # Accepted, accepted, rejected, and again: two stay and the target's own token follows.
    assert measurement([True, True, False] * 30).mean_acceptance_length(2) == 3
    assert measurement([True, True, False] * 30).mean_acceptance_length(5) == 3
    assert measurement([True] * 3).mean_acceptance_length(5) != measurement([True] * 3).mean_acceptance_length(5)


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_the_forecast_is_what_decoding_then_does(exit_layer, n):
    """Over the model's own greedy text, the predicted acceptance length is the measured one."""
    model = tiny.llama(seed=1)
    prompt = torch.randint(3, 64, (1, 6))
    output = layerskip.generate(
        model,
        prompt,
        exit_layer=exit_layer,
        num_draft_tokens=n,
        do_sample=False,
        max_new_tokens=200,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    measured = measure_exits(model, [output.sequences], [exit_layer], start=6)[exit_layer]
    assert measured.num_tokens == 200
    assert measured.mean_acceptance_length(n) == pytest.approx(output.statistics.mean_acceptance_length, rel=0.03)


@pytest.mark.parametrize("n", [1, 3])
def test_the_walk_is_the_mean_over_every_way_decoding_may_go(n):
    """Against a reference that draws every outcome of every draft, for a text of seven tokens."""
    chances = torch.rand(2, 7)
    committed = rounds = 0.0
    for text in chances.tolist():
        # (position, probability) of rounds; each accepted draft multiplies, each rejection ends the round.
        open_rounds = [(0, 1.0)]
        while open_rounds:
            position, probability = open_rounds.pop()
            if position + n + 1 > len(text):
                continue
            rounds += probability
            for accepted in range(n + 1):
                ways = probability * torch.tensor(text[position : position + accepted]).prod().item()
                if accepted < n:
                    ways *= 1 - text[position + accepted]
                committed += ways * (accepted + 1)
                open_rounds.append((position + accepted + 1, ways))
    assert mean_acceptance_length(list(chances), n) == pytest.approx(committed / rounds, rel=1e-6)


def test_texts_of_several_lengths_are_walked_together():
    long, short = torch.rand(40), torch.rand(12)
    alone = [mean_acceptance_length([text], 2) for text in (long, short)]
    assert min(alone) < mean_acceptance_length([long, short, torch.rand(2)], 2) < max(alone)
    assert math.isnan(mean_acceptance_length([torch.rand(4)], 4))
    assert math.isnan(mean_acceptance_length([], 1))


@pytest.mark.slow
@pytest.mark.parametrize(("exit_layer", "n"), [(1, 2), (3, 5)])
def test_the_forecast_for_sampling_is_what_sampling_then_does(exit_layer, n):
    """Over text the model sampled at temperature 1, within the spread of 4 x 150 tokens."""
    model = tiny.llama(seed=1)
    outputs = [
        layerskip.generate(
            model,
            torch.randint(3, 64, (1, 6)),
            exit_layer=exit_layer,
            num_draft_tokens=n,
            do_sample=True,
            top_k=0,
            max_new_tokens=150,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        for _ in range(4)
    ]
    measured = measure_exits(model, [torch.cat([output.sequences for output in outputs])], [exit_layer], start=6)
    seen = sum(output.statistics.mean_acceptance_length for output in outputs) / len(outputs)
    assert measured[exit_layer].mean_acceptance_length(n, sampled=True) == pytest.approx(seen, rel=0.08)


def test_measurements_are_means_over_all_tokens():
    model = tiny.llama()
    ids = torch.randint(3, 64, (5, 12))
    together = measure_exits(model, [ids])
    apart = measure_exits(model, [ids[:2], ids[2:]])
    for exit_layer, m in together.items():
        assert m.loss == pytest.approx(apart[exit_layer].loss, rel=1e-5)
        assert m.overlap == pytest.approx(apart[exit_layer].overlap, rel=1e-5)
        assert m.num_tokens == apart[exit_layer].num_tokens == 55
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert together[4].loss == pytest.approx(expected, rel=1e-5)
    assert together[4].agreement == together[4].overlap == pytest.approx(1.0)


def test_measuring_leaves_the_mode_alone():
    model = tiny.llama().train()
    measure_exits(model, [torch.randint(3, 64, (1, 8))], [1])
    measure_costs(model, [1], max_draft_tokens=2, context=8, repeats=1)
    assert model.training


def test_nothing_to_measure_on():
    with pytest.raises(ValueError, match="at least one batch"):
        measure_exits(tiny.llama(), [])


def test_a_round_costs_its_parts():
    costs = Costs(plain=10.0, draft={2: 1.0}, extend={2: 0.5}, verify={2: {1: 8.0, 3: 9.0, 5: 10.0}})
    assert costs.round(2, 4) == 4 * 1.0 + 0.5 + 10.0
    assert costs.round(2, 3) == 3 * 1.0 + 0.5 + 9.5  # between 3 and 5 positions
    assert costs.round(2, 6) == 6 * 1.0 + 0.5 + 11.0  # beyond the last
    loop = Bookkeeping(plain=0.25, draft=0.125, round=2.0)
    whole = Costs(costs.plain, costs.draft, costs.extend, costs.verify, {2: 0.75}, loop)
    assert (costs.step, whole.step) == (10.0, 10.25)
    assert whole.round(2, 4) == 4 * (1.0 + 0.125) + 0.5 + 10.0 + 2.0
    assert whole.round(2, 4, cut=True) == 4 * (0.75 + 0.125) + 0.5 + 10.0 + 2.0


def test_the_best_setting_is_the_fastest():
    costs = Costs(
        plain=10.0,
        draft={1: 0.5, 2: 1.0},
        extend={1: 0.5, 2: 1.0},
        verify={1: {1: 9.0, 9: 9.0}, 2: {1: 9.0, 9: 9.0}},
    )
    measured = {1: measurement([False] * 99), 2: measurement([True] * 99)}
    best = best_setting(measured, costs)
    assert (best[0].exit_layer, best[0].num_draft_tokens) == (2, 8)
    assert best[0].speedup == pytest.approx(10 * 9 / (8 + 1 + 9))
    assert best[-1].speedup < 1
    assert [f.speedup for f in best] == sorted((f.speedup for f in best), reverse=True)


def test_costs_of_this_machine_are_sane():
    costs = measure_costs(tiny.llama(), [1, 3], max_draft_tokens=4, context=16, repeats=3)
    assert costs.plain > 0
    assert set(costs.draft) == set(costs.extend) == set(costs.verify) == {1, 3}
    assert all(seconds > 0 for table in costs.verify.values() for seconds in table.values())


def test_costs_are_timed_within_the_models_positions():
    """A table of learned positions has no rows past its end."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=24, vocab_size=64, eos_token_id=1))
    assert measure_costs(model, [1], max_draft_tokens=8, context=128, repeats=1, trees=[(2, 2)]).plain > 0


def test_documents_in_one_row_measure_as_they_do_alone():
    """With positions from 0 in each; tokens whose label is -100 do not count, and break the text that is walked."""
    model = tiny.llama()
    first, second = torch.randint(3, 64, (1, 9)), torch.randint(3, 64, (1, 7))
    row = torch.cat([first, second], dim=1)
    labels = row.clone()
    labels[0, 9] = -100  # the second one's first token is predicted by nothing
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    packed = measure_exits(model, [{"input_ids": row, "labels": labels, "position_ids": positions}])
    alone = measure_exits(model, [first, second])
    for exit_layer, m in packed.items():
        assert m.num_tokens == alone[exit_layer].num_tokens == 14
        assert m.loss == pytest.approx(alone[exit_layer].loss, rel=1e-5)
        assert m.overlap == pytest.approx(alone[exit_layer].overlap, rel=1e-5)
        runs, expected = m._agrees, alone[exit_layer]._agrees
        assert [run.tolist() for run in runs] == [run.tolist() for run in expected]
    nothing = {"input_ids": row, "labels": torch.full_like(row, -100)}
    assert measure_exits(model, [first, nothing])[2].num_tokens == 8
    with pytest.raises(ValueError, match="no text to measure"):
        measure_exits(model, [nothing])


@pytest.mark.parametrize(
    ("acceptance", "n", "draft", "tokens", "time", "speedup"),
    [(0.8, 4, 1.0, 3.3616, 18.0, 1.868), (0.9, 4, 3.0, 4.0951, 26.0, 1.575), (0.0, 4, 1.0, 1.0, 18.0, 10 / 18)],
)
def test_a_cycle_on_paper(acceptance, n, draft, tokens, time, speedup):
    """With verification at 12, state at 2 and a plain step at 10; computed by hand."""
    found = cycle(acceptance, n, draft, verify_cost=12.0, state_cost=2.0, plain_cost=10.0)
    assert found.tokens == pytest.approx(tokens, abs=5e-5)
    assert found.time == pytest.approx(time)
    assert found.speedup == pytest.approx(speedup, abs=5e-4)


def test_a_cycle_at_its_edges():
    assert cycle(1.0, 4, 1.0, 10.0).tokens == 5  # where the closed form divides by zero
    assert cycle(0.7, 0, 1.0, 10.0, plain_cost=10.0).speedup == 1  # nothing drafted: plain decoding
    for arguments, said in (
        ((1.2, 4, 1.0, 1.0), "acceptance=1.2"),
        ((0.5, -1, 1.0, 1.0), "num_draft_tokens=-1"),
        ((0.5, 4, -1.0, 1.0), "costs"),
        ((0.5, 4, 1.0, 0.0), "costs"),
    ):
        with pytest.raises(ValueError, match=said):
            cycle(*arguments)


def test_a_cycle_agrees_with_the_walk():
    """Over a long text whose tokens all have the same chance."""
    chances = [torch.full((4000,), 0.8)]
    assert mean_acceptance_length(chances, 4) == pytest.approx(cycle(0.8, 4, 1.0, 12.0).tokens, rel=1e-3)


def test_three_tokens_are_accepted_as_computed_by_hand():
    """p = (.5, .3, .2), q = (.6, .1, .3): 1 - TV = .5 + .1 + .2 = .8, and all that is left of p is the second token."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.1, 0.3])
    accepted = torch.zeros(3)
    grid = (torch.arange(1000) + 0.5) / 1000  # uniforms
    for token in range(3):
        verdict = accept_sampled(
            torch.full((1000, 1), token), q.expand(1000, 1, 3), p.expand(1000, 2, 3), grid[:, None]
        )
        accepted[token] = verdict.num_accepted.float().mean()
        rejected = verdict.next_probabilities[verdict.num_accepted == 0]
        assert torch.allclose(rejected, torch.tensor([0.0, 1.0, 0.0]).expand_as(rejected), atol=1e-6)
    assert (q * accepted).sum() == pytest.approx(0.8, abs=1e-3)
    measurement = ExitMeasurement()
    measured = measure_overlap(measurement, p, q)
    assert measured == pytest.approx(0.8, abs=1e-6)


def measure_overlap(measurement: ExitMeasurement, p: torch.Tensor, q: torch.Tensor) -> float:
    from layerskip.forecast.target_text import TargetText, warper

    ids = torch.zeros(1, 2, dtype=torch.long)
    text = TargetText.read(p.log().expand(1, 2, 3), ids, 1, None, warper(1.0, 1.0))
    measurement._add(q.log().expand(1, 2, 3), text)
    return measurement.overlap


def test_overlap_is_that_of_the_distributions_that_are_sampled_from():
    """Against transformers' processors, applied one position at a time."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    model, ids = tiny.llama(), torch.randint(3, 64, (2, 9))
    measured = measure_exits(model, [ids], [2], temperature=0.7, top_p=0.8)
    hidden = model(ids, output_hidden_states=True)
    early = model.lm_head(model.model.norm(hidden.hidden_states[2]))
    shared = []
    for row in range(2):
        for i in range(8):
            pair = [TemperatureLogitsWarper(0.7)(None, each[row, i][None]) for each in (hidden.logits, early)]
            p, q = (TopPLogitsWarper(0.8)(None, each).softmax(-1) for each in pair)
            shared.append(torch.minimum(p, q).sum().item())
    assert measured[2].overlap == pytest.approx(sum(shared) / 16, rel=1e-5)
    warm = measure_exits(model, [ids], [2])[2]
    assert (warm.loss, warm.agreement) == (measured[2].loss, measured[2].agreement)
    assert warm.overlap != pytest.approx(measured[2].overlap, rel=0.05)


def test_a_cut_head_is_measured_in_the_same_pass():
    """As the whole one with the other tokens' logits at -inf."""
    model, ids = tiny.llama(), torch.randint(3, 64, (2, 20))
    kept = torch.arange(0, 64, 3)
    found = measure_exits(model, [ids], [1, 3], draft_vocabulary=kept)
    assert found[4].cut is None
    for exit_layer in (1, 3):
        logits = model(ids, output_hidden_states=True)
        early = model.lm_head(model.model.norm(logits.hidden_states[exit_layer]))
        outside = torch.ones(64, dtype=torch.bool).index_fill(0, kept, False)
        early = early.masked_fill(outside, float("-inf"))[:, :-1]
        target = logits.logits[:, :-1]
        cut = found[exit_layer].cut
        assert cut.overlap == pytest.approx(torch.minimum(early.softmax(-1), target.softmax(-1)).sum(-1).mean().item())
        assert cut.agreement == pytest.approx((early.argmax(-1) == target.argmax(-1)).float().mean().item())
        assert cut.agreement <= found[exit_layer].agreement
        assert math.isnan(cut.loss)
    everything = measure_exits(model, [ids], [1], draft_vocabulary=torch.arange(64))[1]
    assert everything.cut.overlap == pytest.approx(everything.overlap)
    assert everything.cut.mean_acceptance_length(3) == everything.mean_acceptance_length(3)


def test_a_draft_vocabulary_is_chosen_where_it_pays():
    costs = Costs(10.0, {1: 2.0}, {1: 1.0}, {1: {1: 9.0, 9: 9.0}}, cut_draft={1: 1.0})
    measured = {1: measurement([True, True, True, False] * 25)}
    measured[1].cut = measurement([True, True, True, False] * 25)  # nothing lost
    assert best_setting(measured, costs)[0].draft_vocabulary
    measured[1].cut = measurement([False] * 100)  # all lost
    assert not best_setting(measured, costs)[0].draft_vocabulary
    assert len(best_setting(measured, costs)) == 2 * 8
    measured[1].cut = None
    assert all(
        forecast.draft_vocabulary for forecast in best_setting(measured, costs)
    )  # as in Setting: where it has one


def test_costs_on_paper_are_weights():
    model = tiny.llama()
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    head = 64 * 32
    costs = paper_costs(model, [1, 3], torch.arange(16))
    assert costs.plain == 4 * layer + head
    assert costs.draft == {1: layer + head, 3: 3 * layer + head}
    assert costs.cut_draft == {1: layer + head / 4, 3: 3 * layer + head / 4}
    for n in (1, 5):  # N drafts, the last draft's state, the rest: the early weights are read once more each
        assert costs.round(3, n) == n * (3 * layer + head) + 3 * layer + layer + head


@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}])
def test_the_loop_is_timed_without_layers(arguments, monkeypatch):
    """Every round of it drafts and accepts all it may, and no layer runs."""
    model = tiny.llama()
    layerskip.Stages(model, 1)  # checks itself once
    calls = []
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda *args, **kwargs: calls.append(args))
    loop = measure_bookkeeping(model, max_draft_tokens=4, repeats=1, **arguments)
    assert calls == []
    assert loop.plain > 0
    assert loop.draft >= 0
    assert loop.round >= 0


def test_costs_know_the_cut_head():
    told = []
    costs = measure_costs(
        tiny.llama(), [1, 2], 2, context=8, repeats=1, draft_vocabulary=torch.arange(8), advance=told.append
    )
    assert told == [1, 2]
    assert set(costs.cut_draft) == {1, 2}
    assert min(costs.cut_draft.values()) > 0


TREES = [(2,), (2, 1, 1), (1, 3), "s2_k2_d3", "s3_k2_d5"]


@pytest.fixture(scope="module")
def continued():
    """Three prompts that a tiny model continued greedily, (1, 86) each: what it says, and what its second exit does."""
    model = tiny.llama(seed=1)
    torch.manual_seed(3)
    arguments = {"exit_layer": None, "do_sample": False, "max_new_tokens": 80, "eos_token_id": None}
    texts = [layerskip.generate(model, torch.randint(3, 64, (1, 6)), **arguments) for _ in range(3)]
    return model, texts, measure_exits(model, texts, [2], start=6, branches=3)[2]


@pytest.mark.parametrize("tree", TREES)
def test_trees_are_accepted_as_forecast(continued, tree):
    """Static ones to the token but for the ends of texts; of dynamic ones, what they say off the text is a guess."""
    model, texts, measured = continued
    steps = tokens = 0
    for text in texts:
        arguments = {"do_sample": False, "max_new_tokens": 80, "eos_token_id": None, "return_dict_in_generate": True}
        output = layerskip.generate(model, text[:, :6], exit_layer=2, num_draft_tokens=1, tree=tree, **arguments)
        assert torch.equal(output.sequences, text)
        steps, tokens = steps + output.statistics.num_steps, tokens + output.statistics.num_tokens
    limit = 0.03 if isinstance(tree, tuple) else 0.12
    assert measured.mean_acceptance_length(tree) == pytest.approx(tokens / steps, rel=limit)
    assert measured.mean_acceptance_length(tree) > measured.mean_acceptance_length(len(parse_shape(tree).widths))


def test_a_tree_of_one_branch_is_a_chain(continued):
    measured = continued[2]
    assert measured.mean_acceptance_length((1, 1, 1)) == measured.mean_acceptance_length(3)
    assert measured.mean_acceptance_length("s3_k1_d3") == measured.mean_acceptance_length(3)
    # With room for every node that grew, none is left out at the end.
    assert measured.mean_acceptance_length("s1_k3_d3") == measured.mean_acceptance_length((3,))
    with pytest.raises(ValueError, match="more branches than the 3 that were measured"):
        measured.mean_acceptance_length((4, 1))


def test_dynamic_trees_keep_what_the_draft_believes():
    """By hand: two branches a node, two nodes a level, three of the four verified."""
    log = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]]).log()
    shape = parse_shape("s2_k2_d3")
    # Level 1: .6, .4. Level 2 keeps .54 and .36 (each the first child). Of all four the best are .6, .54, .4.
    for ranks, accepted in (((0, 0), 2), ((0, 1), 1), ((1, 0), 1), ((1, 1), 1), ((2, 0), 0)):
        ends = dynamic_ends(log, torch.tensor([*ranks, 0]), shape)
        assert ends.tolist() == [[float(j == accepted) for j in range(3)]]
    whole = dynamic_ends(log, torch.tensor([1, 0, 0]), parse_shape("s2_k2_d4"))
    assert whole.argmax().item() == 2  # with room for all four the less likely branch goes on too


def test_siblings_are_accepted_as_recursive_rejection_does():
    """Against the rule itself, over many draws; a draft vocabulary leaves out of p what q cannot say."""
    torch.manual_seed(0)
    number, k = 40_000, 3
    p, q = (torch.randn(6).mul(1.5).softmax(-1) for _ in range(2))
    q[5] = 0
    q /= q.sum()
    for width in range(1, k + 1):
        draws = (q.expand(number, 6) / torch.empty(number, 6).exponential_()).topk(width, dim=-1).indices
        parents, valid = torch.zeros(number, width, dtype=torch.long), torch.ones(number, width, dtype=torch.bool)
        targets = p.expand(number, width + 1, 6)
        walk, _ = walk_sampled(draws, parents, valid, q.expand(number, 1, 6), targets, torch.rand(number, width))
        seen = walk.num_accepted.float().mean().item()
        for kept in (slice(None), slice(0, 5)):
            found = sibling_chances(p[kept].expand(number, -1), q[kept].expand(number, -1), k)
            assert found[:, width - 1].mean().item() == pytest.approx(seen, abs=0.01)
    equal = sibling_chances(p[None], p[None], 2)
    assert equal[0].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("tree", [(2, 1), (2, 2), "s2_k2_d3"])
def test_sampled_trees_are_accepted_as_forecast(tree):
    model = tiny.llama(seed=1)
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 200, "eos_token_id": None}
    torch.manual_seed(5)
    outputs = [
        layerskip.generate(
            model,
            torch.randint(3, 64, (1, 6)),
            exit_layer=2,
            num_draft_tokens=1,
            tree=tree,
            return_dict_in_generate=True,
            **arguments,
        )
        for _ in range(5)
    ]
    texts = torch.cat([output.sequences for output in outputs])
    measured = measure_exits(model, [texts], [2], start=6, branches=2, sampled=True)[2]
    seen = sum(output.statistics.mean_acceptance_length for output in outputs) / len(outputs)
    assert measured.mean_acceptance_length(tree, sampled=True) == pytest.approx(seen, rel=0.08)
    assert measured.mean_acceptance_length((1,), sampled=True) == pytest.approx(
        measured.mean_acceptance_length(1, sampled=True), rel=1e-4
    )


def test_the_interval_is_of_other_texts_of_the_kind():
    """Nine of ten times it holds the mean over all texts there are, give or take; more texts make it narrower."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.rand(400, generator=generator).mul(0.8).add(0.1).tolist()
    texts = [torch.rand(60, generator=generator) < rate for rate in rates]

    def measured(some) -> ExitMeasurement:
        found = ExitMeasurement(num_tokens=1)
        found._agrees.extend(some)
        return found

    truth = measured(texts).mean_acceptance_length(2)
    widths, inside = [], 0
    for first in range(0, 400, 10):
        low, high = measured(texts[first : first + 10]).acceptance(2).interval()
        widths.append(high - low)
        inside += low <= truth <= high
    assert 0.7 <= inside / 40 <= 1
    low, high = measured(texts).acceptance(2).interval()
    assert low < truth < high
    assert high - low < 0.4 * sum(widths) / len(widths)
    assert measured(texts[:1]).acceptance(2).interval() is None
    assert measured([texts[0], texts[1][:2]]).acceptance(2).interval() is None  # one text is too short for a round


def test_a_round_of_a_tree_costs_its_passes():
    trees = TreeCosts({1: 1.0, 2: 2.0, 4: 3.0}, {1: 0.5, 2: 0.75, 4: 1.0}, {2: 0.25, 4: 0.375}, {5: 7.0, 7: 9.0})
    loop = Bookkeeping(trees={"2,1,1": 0.5, "s3_k2_d4": 0.625})
    costs = Costs(10.0, {1: 1.0}, {1: 0.5}, {1: {1: 8.0, 2: 8.0}}, {1: 0.5}, loop, {1: trees})
    # The root, two nodes, two nodes; the last two without a head; the root and six nodes are verified.
    assert costs.round(1, (2, 1, 1)) == 1.0 + 2.0 + 2.0 + 0.25 + 9.0 + 0.5
    assert costs.round(1, (2, 1, 1), cut=True) == 0.5 + 0.75 + 0.75 + 0.25 + 9.0 + 0.5
    assert costs.round(1, "s3_k2_d4") == 1.0 + 2.0 + 2.0 + 0.25 + 7.0 + 0.625
    assert costs.layers(1, (2, 2)) == 1.0 + 2.0 + 0.375 + 9.0  # a root and six nodes too; the last level has four
    with_trees = best_setting({1: continued_once()}, costs, 2, trees=[(2, 1, 1)])
    assert {(f.tree, f.num_draft_tokens) for f in with_trees} == {(None, 1), (None, 2), ((2, 1, 1), 3)}
    tree = next(f for f in with_trees if f.tree)
    assert tree.speedup == pytest.approx(tree.mean_acceptance_length * 10 / costs.round(1, (2, 1, 1)))
    without = Costs(10.0, {1: 1.0}, {1: 0.5}, {1: {1: 8.0, 2: 8.0}})
    assert all(f.tree is None for f in best_setting({1: continued_once()}, without, 2, trees=[(2, 1, 1)]))


def continued_once() -> ExitMeasurement:
    model, text = tiny.llama(), torch.randint(3, 64, (2, 40))
    return measure_exits(model, [text], [1], branches=2)[1]


def test_trees_are_timed_too():
    """Every pass that a tree takes, and its round in the loop, where the accepted path is moved together."""
    model, trees = tiny.llama(), [(2, 1), "s2_k2_d3"]
    costs = measure_costs(model, [1], 2, context=8, repeats=1, draft_vocabulary=torch.arange(8), trees=trees)
    found = costs.trees[1]
    assert (set(found.draft), set(found.cut_draft), set(found.extend)) == ({1, 2}, {1, 2}, {1, 2})
    assert set(found.verify) == {4, 5}
    assert set(costs.verify[1]) == {1, 2, 3}  # every width that a chain may have
    loop = measure_bookkeeping(model.eval(), 2, 1, trees, do_sample=False)
    assert set(loop.trees) == {"2,1", "s2_k2_d3"}
    assert min(loop.trees.values()) > 0
    assert measure_costs(model, [1], 2, context=8, repeats=1).trees == {}
    assert measure_costs(model, [], 2, context=8, repeats=1).plain > 0
