"""Forecasts against decoding itself, and the cost model against closed forms."""

import math

import pytest
import torch

import layerskip
from layerskip.forecast import Costs, ExitMeasurement, best_setting, measure_costs, measure_exits
from layerskip.walk import mean_acceptance_length
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
