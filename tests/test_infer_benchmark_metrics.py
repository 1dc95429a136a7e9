"""What `benchmark` records of latencies, rounds, failures and costs, each against its definition."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from infer.benchmarking.arms import Arm, Output, plain, plain_loop, self_speculative
from infer.benchmarking.ideal import CostModel, cost_model, is_chain
from infer.benchmarking.latency import TimedOutError, Timing, TimingStreamer, summary
from infer.benchmarking.measured import Measured
from infer.benchmarking.measurement import Protocol, measure
from infer.benchmarking.record import record
from infer.benchmarking.report import LATENCY_COLUMNS, ROUND_COLUMNS, explain, latency_row, round_row
from infer.benchmarking.rivals import assistant_early_exit
from infer.command import main
from infer.conditions import fingerprint
from infer.loading import Loaded
from infer.options import DecodingOptions
from layerskip.checkpoint.settings import Setting
from layerskip.decode.stats import Statistics
from layerskip.decode.step import Step
from layerskip.forecast import cycle
from tests import tiny
from tests.programs import prompts, quiet

GREEDY = DecodingOptions(max_new_tokens=15).generate_arguments()
SETTING = Setting(2, 3)


@pytest.fixture
def model():
    return tiny.endless(tiny.llama())


@pytest.fixture(scope="module")
def measured():
    """Plain decoding, the loop, a chain, transformers' early exit."""
    torch.manual_seed(0)
    model = tiny.endless(tiny.llama())
    arms = [plain(), plain_loop(), self_speculative(SETTING), assistant_early_exit(SETTING)]
    return measure(model, arms, Protocol(prompts(), GREEDY, 2), quiet)


def outputs(*calls: tuple[float, list[tuple[float, int]]]) -> list[Output]:
    """Calls of so many seconds that handed out so many tokens at so many seconds."""
    timings = [Timing(seconds, tuple(bursts), seconds) for seconds, bursts in calls]
    return [Output([0] * timing.num_tokens, timing.seconds, None, None, timing) for timing in timings]


def test_every_arm_is_timed_by_what_it_hands_out(measured):
    for entry in measured:
        for output in entry.calls:
            times = [seconds for seconds, _ in output.timing.bursts]
            assert output.timing.num_tokens == len(output.tokens) == 15
            assert times == sorted(times)
            assert 0 < output.timing.first_seconds == times[0] <= output.seconds * 1.5
    assert all(tokens == 1 for entry in measured[:2] for t in entry.timings for _, tokens in t.bursts)
    for entry in measured[2:]:
        assert sum(len(timing.bursts) for timing in entry.timings) == entry.statistics.num_steps


def test_transformers_rounds_accept_what_ours_do(measured):
    """The same drafts and the same rule, one counted from what is handed out, the other by the loop itself."""
    ours, theirs = (record(entry, measured[0]) for entry in measured[2:])
    for name in ("num_steps", "num_drafted"):
        assert ours[name] == theirs[name]
    longest = len(theirs["acceptance_histogram"])
    assert ours["acceptance_histogram"][:longest] == theirs["acceptance_histogram"]
    assert not any(ours["acceptance_histogram"][longest:])


def test_latencies_by_their_definitions():
    entry = Measured(plain(), [outputs((2.0, [(0.5, 3), (1.0, 1), (2.0, 2)]), (1.0, [(0.25, 1)]))])
    found = record(entry, entry)["latency"]
    assert found["ttft"]["median"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["tpot"]["mean"] == pytest.approx((2.0 - 0.5) / 5)  # the call of one token has none
    assert (found["gap"]["median"], found["gap"]["mean"]) == (0.75, 0.75)
    assert found["end_to_end"]["median"] == 1.5
    assert entry.decode_tokens_per_second == pytest.approx(3 / (1.5 + 0.75))
    assert record(entry, entry)["requests_per_second"] == pytest.approx(2 / 3, abs=1e-4)


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=37).tolist()
    found = summary(values)
    assert [found["median"], found["p95"], found["mean"]] == pytest.approx(
        [*np.percentile(values, [50, 95]), np.mean(values)], abs=1e-6
    )
    assert summary([]) is None


def test_a_prompt_that_is_handed_out_is_no_output_and_what_is_cut_is_not_counted():
    watch = TimingStreamer()
    for value in (torch.zeros(1, 4), torch.zeros(1), torch.zeros(1, 3)):
        watch.put(value)
    watch.end()
    assert [tokens for _, tokens in watch.timing(1.0, 3).bursts] == [1, 2]
    assert TimingStreamer().timing(1.0, 0) is None


def test_speedups_are_of_the_calls_that_both_finished():
    baseline = Measured(plain(), [outputs((1.0, [(0.5, 1), (1.0, 9)]), (4.0, [(2.0, 1), (4.0, 9)])), [None, None]])
    fast = outputs((0.5, [(0.3, 2), (0.5, 8)]))[0]
    entry = Measured(plain(), [[fast, None], [fast, fast]])
    assert entry.speedup(baseline) == pytest.approx(2)
    assert entry.speedup_by_prompt(baseline) == [pytest.approx(2), None]
    assert entry.median_speedup(baseline) == pytest.approx(2)
    assert entry.speedup_by_repeat(baseline) == pytest.approx([2])
    assert entry.decode_speedup(baseline) == pytest.approx((8 / 0.2) / (9 / 0.5))
    json.dumps(record(entry, baseline), allow_nan=False)


def test_rounds_add_up(measured):
    for entry in measured:
        found = record(entry, measured[0])
        assert sum(found["seconds_by_part"].values()) == pytest.approx(found["seconds"], abs=1e-3)
        assert sum(map(sum, found["calls"]["tokens"])) == found["tokens"] == 4 * 15
        assert len(latency_row(found)) == len(LATENCY_COLUMNS)
        assert len(round_row(found)) == len(ROUND_COLUMNS)
    chain = record(measured[2], measured[0])
    histogram = chain["acceptance_histogram"]
    assert sum(histogram) == chain["num_steps"]
    assert sum(n * count for n, count in enumerate(histogram)) == chain["num_accepted"]
    assert list(chain["seconds_by_part"]) == ["prefill", "draft", "verify", "rollback", "other"]
    assert list(record(measured[0], measured[0])["seconds_by_part"]) == ["first_token", "decode"]


def test_acceptance_by_position_against_a_count_of_every_round():
    generator, total, rounds = np.random.default_rng(1), Statistics(), []
    for _ in range(3):
        statistics = Statistics()
        for _ in range(40):
            levels = int(generator.integers(0, 5))
            accepted = int(generator.integers(0, levels + 1))
            rounds.append((levels, accepted))
            tokens = torch.zeros(1, accepted + 1)
            statistics.add(Step(tokens, levels, accepted, 1.0, 1.0, 1.0, num_levels=levels))
        assert statistics.first_step_seconds == 3
        total.merge(statistics)
    assert total.first_step_seconds == 9
    assert total.acceptance_histogram == [sum(a == n for _, a in rounds) for n in range(5)]
    for position in range(4):
        proposed = [a for levels, a in rounds if levels > position]
        reached = [a for a in proposed if a >= position]
        assert total.acceptance_by_position[position] == np.mean([a > position for a in proposed])
        assert total.conditional_acceptance[position] == np.mean([a > position for a in reached])


def test_a_call_that_fails_is_counted_and_the_others_go_on(model):
    bad = prompts(3)[1]

    def fragile(model, prompt, arguments):
        if prompt.equal(bad) and arguments["max_new_tokens"] == 15:
            raise ValueError("not this one")
        return plain().decode(model, prompt, arguments)

    arguments = DecodingOptions(max_new_tokens=15).generate_arguments()
    baseline, entry = measure(model, [plain(), Arm("fragile", fragile)], Protocol(prompts(3), arguments, 2), quiet)
    found = record(entry, baseline, {})
    assert (found["error"], found["num_errors"], found["num_timeouts"], found["num_calls"]) == (None, 2, 0, 4)
    assert [place is None for place in found["speedup_by_prompt"]] == [False, True, False]
    assert found["failures"][0] == {"repeat": 0, "prompt": 1, "reason": "ValueError: not this one"}
    assert "fragile: prompt 1, repeat 1: ValueError: not this one" in explain(found)


def test_calls_that_take_too_long_are_broken_off(model):
    watch = TimingStreamer(timeout=1e-9)
    with pytest.raises(TimedOutError, match="longer than --timeout 1e-09 seconds"):
        watch.put(torch.zeros(1))
    arms = [plain(), self_speculative(SETTING), assistant_early_exit(SETTING)]
    for entry in measure(model, arms, Protocol(prompts(), GREEDY, timeout=1e-9), quiet):
        found = record(entry, entry)
        assert (found["num_timeouts"], found["num_errors"]) == (2, 0)
        assert "took longer than" in found["error"]
    assert plain().run(model, prompts()[0], GREEDY).tokens  # nothing is left of the broken off calls
    assert not model.model.layers[0]._forward_hooks


def test_a_baseline_that_takes_too_long_is_an_error(tiny_checkpoint, capsys):
    assert main(["benchmark", str(tiny_checkpoint), "--arms", "loop", "--timeout", "1e-9", "--num-prompts", "1"]) == 2
    err = capsys.readouterr().err
    assert "plain decoding fails" in err
    assert "took longer than --timeout 1e-09 seconds" in err


def test_the_ideal_is_the_cost_models_cycle(model):
    loaded = Loaded("tiny", model, None)
    arms = [plain(), self_speculative(SETTING), assistant_early_exit(SETTING), self_speculative(Setting(1, 2))]
    costs = cost_model(loaded, arms, prompts(), GREEDY)
    json.dumps(costs.record(), allow_nan=False)
    rate = 0.7
    here = costs.here
    wanted = cycle(
        rate,
        3,
        draft_cost=here.draft[2] + here.bookkeeping.draft,
        verify_cost=here.verify[2][4],
        state_cost=here.extend[2] + here.bookkeeping.round,
        plain_cost=here.step,
    )
    found = costs.ideal(arms[1], {"mean_acceptance_length": wanted.tokens, "drafted_per_step": 3.0})
    assert found["stage_seconds"] == pytest.approx(wanted.speedup, rel=1e-3)
    assert costs.ideal(arms[0], {}) is None
    assert costs.ideal(arms[2], {"mean_acceptance_length": 2.0, "drafted_per_step": 3.0}) is None  # another's loop


def test_an_ideal_between_two_draft_lengths_lies_between_theirs(model):
    costs = cost_model(Loaded("tiny", model, None), [self_speculative(SETTING)], prompts(), GREEDY)
    assert isinstance(costs, CostModel)
    arm, length = self_speculative(SETTING), {"mean_acceptance_length": 2.0}
    low, middle, high = (costs.ideal(arm, length | {"drafted_per_step": n})["weights_read"] for n in (2, 2.5, 3))
    assert low > middle > high
    assert not is_chain(self_speculative(replace(SETTING, lookup="hybrid")))
    assert not is_chain(self_speculative(Setting(2, 0, tree=(2, 1))))


def test_prompts_have_a_fingerprint():
    assert fingerprint(prompts()) == fingerprint(prompts())
    assert fingerprint(prompts()) != fingerprint(prompts(3))
    assert fingerprint(prompts()) != fingerprint([prompt + 1 for prompt in prompts()])


def test_more_tables_are_shown_when_asked_for(tiny_checkpoint, capsys):
    flags = ("--exit-layers", "2", "--arms", "chain", "--repeats", "1", "--num-prompts", "1", "--max-new-tokens", "6")
    shown = []
    for more in ((), ("--verbose",)):
        assert main(["benchmark", str(tiny_checkpoint), *flags, *more]) == 0
        shown.append(capsys.readouterr().out)
    for name in ("latency, greedy", "rounds, greedy"):
        assert name not in shown[0]
        assert name in shown[1]
    assert shown[1].count("commit ") >= 4  # each table carries its conditions
    result = json.loads(shown[1].splitlines()[-1])
    assert result["greedy"][1]["ideal"]["weights_read"] > 0
    assert result["costs"]["greedy"]["seconds"]["plain"] > 0
    for name in ("prompts_fingerprint", "load_average", "cores", "parameters", "other_packages", "seed"):
        assert name in result["conditions"]
