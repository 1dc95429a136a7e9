"""Drafts that are weighed: exact whatever the clock says, worth their time, and given up where they are not."""

import argparse
import random
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList

import layerskip
from infer.errors import InputError
from infer.speculation import SpeculationOptions, add_speculation_flags
from layerskip.checkpoint.resolving import resolve_setting
from layerskip.checkpoint.settings import Setting, carry, store_setting, tuned_setting
from layerskip.decode.decoding import decode
from layerskip.decode.step import Step
from layerskip.draft import adaptive as module
from layerskip.draft import drafters, remembered
from layerskip.draft.adaptive import Adaptive
from layerskip.draft.drafters import ExitDrafter, LookupDrafter
from layerskip.draft.drafting import chain_of, draft_chain
from layerskip.draft.exits import known_exits
from layerskip.draft.remembered import adaptive_for, forget
from layerskip.draft.round_times import RoundTimes
from layerskip.exact.acceptance import walk_sampled
from layerskip.exact.sampling import Sampler
from layerskip.model.stages import Stages
from layerskip.model.tree import Shape
from tests import tiny
from tests.distributions import chi_square_p_value
from tests.enumeration import Proposal, emitted_law, law_of, models, without_replacement
from tests.scripted import ScriptedCache, ScriptedStages, adaptive, random_table

V = 4
PLAIN = 11.0  # seconds of a plain round of the scripted exits, see `scripted.adaptive`


def scores(*probabilities, vocab=50):
    """(B, 1, vocab): the first token with that probability, the others share the rest."""
    rows = torch.tensor(probabilities)[:, None].expand(-1, vocab).clone()
    rows[:, 1:] = (1 - rows[:, 1:]) / (vocab - 1)
    return rows.log()[:, None]


def step(drafted, accepted, draft=0.0, verify=0.0):
    return Step(torch.zeros(1, accepted + 1), drafted, accepted, draft, verify, 0.0)


def round_of(weigher, confidence, right, slow=1.0):
    """One round: tokens of this confidence, of which the first `right` stay; the exit that drafted and how many."""
    most, drafted, looks = weigher.begin(), 0, 0
    exit_layer = weigher.exit_layer
    while drafted < most:
        looks += 1
        if not bool(weigher.goes_on(scores(confidence)).all()):
            break
        drafted += 1
    if exit_layer is None:
        weigher.end([step(0, 0, verify=slow * PLAIN)])
        return None, 0
    head = looks * (exit_layer + 1) + (drafted == most) * exit_layer
    weigher.end([step(drafted, min(right, drafted), slow * head, slow * (PLAIN - exit_layer) * (1 + 0.02 * drafted))])
    return exit_layer, drafted


# --- what is chosen ---


@pytest.mark.parametrize(("right", "least", "most"), [(8, 7, 8), (2, 2, 3), (1, 1, 1)])
def test_chains_become_as_long_as_pays(right, least, most):
    weigher = adaptive(8)
    drafted = [round_of(weigher, 0.8, right)[1] for _ in range(150)]
    assert least <= sum(drafted[-40:]) / 40 <= most + 0.5


def test_what_does_not_pay_is_given_up_and_seldom_tried_again():
    weigher = adaptive(4, acceptance=0.7)
    exits = [round_of(weigher, 0.99, 0)[0] for _ in range(300)]
    assert exits[0] == 1  # what the checkpoint promises is believed at first
    assert sum(e is not None for e in exits) <= 16
    assert 1 <= sum(e is not None for e in exits[100:]) <= 6
    later = [round_of(weigher, 0.99, 4)[0] for _ in range(200)]
    assert all(e == 1 for e in later[-50:])  # and taken up again where it pays after all


def test_an_exit_that_nobody_taught_is_only_tried():
    weigher = adaptive(8, exits=(3, 6), acceptance=0.1, trained=False)
    rounds = [round_of(weigher, 0.6, 0) for _ in range(128)]
    assert rounds[0] == (None, 0)
    assert sum(drafted for _, drafted in rounds) <= 5


@pytest.mark.parametrize("better", [1, 4])
def test_the_exit_that_brings_more_is_found_and_found_again(better):
    weigher = adaptive(4, exits=(1, 4), acceptance=0.5)

    def one(better):
        chosen = weigher.begin  # the exit is known only after `begin`, so the outcome is decided inside

        def begin():
            n = chosen()
            one.right = 3 if weigher.exit_layer == better else 0
            return n

        weigher.begin = begin
        try:
            most, drafted = weigher.begin(), 0
            e = weigher.exit_layer
            while drafted < most and bool(weigher.goes_on(scores(0.7)).all()):
                drafted += 1
            looks = min(drafted + 1, most)
            head = 0 if e is None else looks * (e + 1) + (drafted == most) * e
            rest = PLAIN if e is None else (PLAIN - e) * (1 + 0.02 * drafted)
            weigher.end([step(drafted, min(one.right, drafted), head, rest)])
        finally:
            weigher.begin = chosen
        return e

    assert [one(better) for _ in range(120)][-40:].count(better) >= 36
    other = 5 - better
    assert [one(other) for _ in range(400)][-40:].count(other) >= 34


def test_confidence_decides_within_a_chain():
    """The exit is right exactly where it is sure."""
    weigher = adaptive(4)
    for i in range(80):
        sure = i % 2 == 0
        round_of(weigher, 0.95 if sure else 0.35, 4 if sure else 0)
    lengths = {sure: [] for sure in (0.95, 0.35)}
    for _ in range(10):
        for sure, found in lengths.items():
            found.append(round_of(weigher, sure, 4 if sure > 0.5 else 0)[1])
    assert sum(lengths[0.95]) >= 25
    assert sum(lengths[0.35]) <= 2


def test_a_batch_has_one_decision_and_shares_the_time():
    weigher = adaptive(4)
    weigher.prospects[0].priors = [0.01] * 5 + [0.9] * 5
    assert weigher.begin() > 0
    together = weigher.goes_on(scores(0.9, 0.1, 0.9))
    assert together.tolist() == [True] * 3
    assert weigher.goes_on(scores(0.01, 0.01, 0.01)).tolist() == [False] * 3
    weigher.end([step(1, 1, 1.0, 1.0), step(1, 0, 1.0, 1.0), step(1, 1, 1.0, 1.0)])
    assert weigher.prospects[0].judged[0] == 3
    assert weigher.prospects[0].stayed[0] == 2


def test_rounds_that_something_else_drafted_teach_nothing():
    stages, cache = ScriptedStages(random_table(V, 1), random_table(V, 1)), ScriptedCache()
    weigher = adaptive(2)
    seen = []
    weigher.end = lambda steps: seen.append(steps[0].num_drafted)
    drafter = LookupDrafter(3, Shape((1, 1)), branch=False, draft_stop=weigher)
    prompt = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]])
    steps = list(decode(stages, prompt, Sampler(), lambda _, new: (new.shape[1], False), drafter=drafter,
                        max_length=30, cache=cache))  # fmt: skip
    assert steps[0].num_drafted == 3  # looked up
    assert len(seen) < len(steps)


# --- times ---


def test_times_are_medians_and_guessed_by_weights_until_seen():
    times = RoundTimes({("plain",): 10.0, ("draft", 2): 2.0, ("draft", 4): 4.0, ("verify", 2): 8.0, ("verify", 4): 6.0})
    assert (times.plain, times.draft(4)) == (10, 4)
    for seconds in (0.2, 0.2, 9.0, 0.2):
        times.add(("draft", 2), seconds)
    assert times.draft(2) == pytest.approx(0.2)
    assert times.draft(4) == pytest.approx(0.4)
    assert times.plain == pytest.approx(1.0)
    assert not times.knows_plain
    times.add(("plain",), 3.0)
    assert times.plain == 3.0
    assert times.draft(4) == pytest.approx(0.4)  # still by its own kind


def test_what_a_token_adds_to_verification_is_the_slope_through_the_medians():
    times = RoundTimes({("plain",): 10.0, ("verify", 2): 8.0})
    for _ in range(9):
        for n in (0, 2, 4, 6, 8):
            times.add(("verify", 2, n), 1.0 + 0.1 * n)
    assert times.further(2) == pytest.approx(0.1, rel=0.05)
    assert times.verify(2, 5) == pytest.approx(1.5, rel=0.02)
    times.rebase()
    assert times.plain / times.verify(2, 0) == pytest.approx(10 / 8, rel=0.2)


# --- exactness ---


class Restless(Adaptive):
    """Told times at random, so that its choices vary."""

    def end(self, steps):
        super().end([replace(s, draft_seconds=random.random(), verify_seconds=2 * random.random()) for s in steps])


def restless(most, exits=(1,), seed=0):
    random.seed(seed)
    calm = adaptive(most, exits)
    return Restless(most, calm.prospects, calm.times)


class TwoExits(ScriptedStages):
    """Exit 1 and exit 2 draft from tables of their own."""

    def __init__(self, target, drafts):
        super().__init__(target, drafts[1])
        self.drafts, self.used = drafts, set()

    def use(self, exit_layer):
        self.exit_layer, self.draft_logits = exit_layer, self.drafts[exit_layer]
        self.used.add(exit_layer)


def samples_of_three(n, acceptance="rejection"):
    """Continuations of three tokens, one weigher in all of them: what was drawn before sways what is drafted."""
    torch.manual_seed(1)
    target, drafts = random_table(V, seed=1), {1: random_table(V, seed=2), 2: random_table(V, seed=3)}
    weigher, stages, samples, lengths = restless(3, (1, 2)), TwoExits(target, drafts), [], set()
    for i in range(n):
        sampler = Sampler(do_sample=True, acceptance=acceptance, seeds=(i,))
        steps = list(
            decode(stages, torch.tensor([[0]]), sampler, lambda _, new: (new.shape[1], False),
                   drafter=ExitDrafter(Shape((1, 1, 1)), weigher), max_length=4, cache=ScriptedCache())
        )  # fmt: skip
        lengths |= {s.num_drafted for s in steps[:1]}
        samples.append(tuple(token for s in steps for token in s.tokens[0].tolist()))
    law = {}
    for first in range(V):
        for second in range(V):
            for third in range(V):
                prefixes = ((0,), (0, first), (0, first, second))
                chances = [target(prefix).softmax(-1) for prefix in prefixes]
                law[first, second, third] = float(chances[0][first] * chances[1][second] * chances[2][third])
    return samples, law, lengths, stages.used


@pytest.mark.parametrize("acceptance", ["rejection", "block", "coupled"])
def test_the_loop_has_the_targets_law_whatever_is_chosen(acceptance):
    samples, law, lengths, used = samples_of_three(600, acceptance)
    assert lengths >= {0, 1, 2}
    assert used == {1, 2}
    assert chi_square_p_value(samples, law) > 1e-4


def test_a_weigher_that_anticipates_is_refused(monkeypatch):
    """It weighs each token by its own chance, after it was drawn."""

    def chain(*args):
        draft = draft_chain(*args)
        if draft.probabilities is None:
            return draft
        likely = draft.probabilities.gather(2, draft.tokens[..., None])[0, :, 0] > 0.3
        n = int(likely.long().cumprod(0).sum())
        cache, rows = args[1], args[2]
        del cache.early[0][len(cache.late[0]) + n + 1 :]
        return chain_of(rows, draft.tokens[:, :n], draft.hidden[:, : n + 1], draft.probabilities[:, :n])

    monkeypatch.setattr(drafters, "draft_chain", chain)
    samples, law, *_ = samples_of_three(1200)
    assert chi_square_p_value(samples, law) < 1e-6


def stops_by(weigher, draft):
    """Whether a token is drafted after a prefix, by the draft's distribution there."""

    def keep(prefix, siblings):
        weigher.begin()
        return all(bool(weigher.goes_on(draft[d][prefix[:d]].log()[None, None])) for d in range(len(prefix) + 1))

    return keep


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_the_exact_law_of_a_round_that_is_weighed(seed):
    """By enumeration: of a weigher that stops at some prefixes; and the same refuses one that looks at the token."""
    target, draft = models([0, 1, 2], 3, seed)
    weigher = adaptive(3)
    weigher.prospects[0].priors = [0.02] * 6 + [0.9] * 4
    listed = list(without_replacement([0, 1, 2], draft, stops_by(weigher, draft)))
    assert len({sum(proposal.valid) for proposal in listed}) > 1
    law, _ = emitted_law(walk_sampled, [0, 1, 2], iter(listed), target, draft)
    torch.testing.assert_close(law, law_of(target), atol=1e-6, rtol=0)

    def anticipating():
        for proposal in without_replacement([0, 1, 2], draft):
            likely = float(draft[0][proposal.tokens[0]]) > 0.5
            yield Proposal(proposal.weight, proposal.tokens, (likely,) * 3)

    wrong, _ = emitted_law(walk_sampled, [0, 1, 2], anticipating(), target, draft)
    assert (wrong - law_of(target)).abs().max() > 1e-3


@pytest.fixture
def wild_clock(monkeypatch):
    """Every look at the clock finds another pace: what is drafted varies as it never would."""
    random.seed(3)
    now = [0.0]

    def clock():
        now[0] += random.random() ** 4
        return now[0]

    monkeypatch.setattr(module, "thread_time", clock)
    monkeypatch.setattr(remembered, "thread_clock_serves", lambda device: True)


AUTO = {"exit_layer": "auto", "num_draft_tokens": "auto"}


def taught(model):
    carry(model.config, exits={str(e): {"agreement": 0.7, "overlap": 0.7} for e in (1, 2, 3)})
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3", "falcon", "deepseek_v3"])
def test_greedy_output_is_the_models_under_any_clock(name, wild_clock, monkeypatch):
    model = taught(tiny.architecture(name))
    prompt = torch.arange(5, 17)[None]
    arguments = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(prompt)}
    layerskip.generate(model, prompt, max_new_tokens=1, **arguments, **AUTO)  # every exit is checked
    used, draft = set(), Stages.draft
    monkeypatch.setattr(Stages, "draft", lambda self, *args: (used.add(self.exit_layer), draft(self, *args))[1])
    expected, drafted = model.generate(prompt, max_new_tokens=40, **arguments), 0
    for _ in range(3):  # a call begins with what the one before has learnt
        output = layerskip.generate(model, prompt, max_new_tokens=40, **arguments, **AUTO, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        drafted += output.statistics.num_drafted
    assert drafted >= 5
    assert len(used) >= 2


@pytest.mark.parametrize("ticks", [0.0, 1 / 64])
def test_a_coarse_clock_changes_nothing(ticks, monkeypatch):
    """One that stands still for whole rounds, as Windows' does for a thread."""
    looks = iter(range(10**6))
    monkeypatch.setattr(module, "thread_time", lambda: next(looks) // 40 * ticks)
    monkeypatch.setattr(remembered, "thread_clock_serves", lambda device: True)
    model, prompt = taught(tiny.llama()), torch.arange(5, 12)[None]
    arguments = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 40}
    expected = model.generate(prompt, **arguments)
    for _ in range(2):
        assert torch.equal(layerskip.generate(model, prompt, **arguments, **AUTO), expected)


@pytest.mark.parametrize(("serves", "seconds"), [(True, 5.0), (False, PLAIN)])
def test_rounds_are_timed_by_the_wall_where_the_threads_clock_does_not_serve(serves, seconds, monkeypatch):
    looks = iter((1.0, 1.0, 6.0))  # at the beginning of a round, after its draft, at its end
    monkeypatch.setattr(module, "thread_time", lambda: next(looks))
    monkeypatch.setattr(remembered, "thread_clock_serves", lambda device: serves)
    with adaptive_for(Stages(tiny.llama(), 2), Setting(2, "auto"), sampled=False) as weigher:
        assert weigher.begin() == 0  # nobody taught this exit
        weigher.drafted()
        weigher.end([step(0, 0, verify=PLAIN)])
        assert weigher.times.plain == seconds


def test_a_position_where_nothing_may_follow_is_not_drafted(monkeypatch):
    """All is banned at every third position; plain greedy decoding then takes token 0."""
    model, prompt = taught(tiny.llama()), torch.arange(5, 12)[None]
    banning = LogitsProcessorList([lambda ids, scores: scores if ids.shape[1] % 3 else scores.fill_(-torch.inf)])
    arguments = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "logits_processor": banning}
    monkeypatch.setattr(RoundTimes, "plain", 1e9)  # seconds: always worth a draft
    expected = model.generate(prompt, **arguments)
    assert torch.equal(layerskip.generate(model, prompt, **arguments, **AUTO), expected)


@pytest.mark.parametrize("asked", [{"exit_layer": None}, {"exit_layer": None, "lookup": "only"}, {"lookup": "only"}])
def test_a_checkpoint_tuned_to_the_stop_cost_decodes_without_its_exit(asked):
    model, prompt = tiny.llama(), torch.arange(5, 12)[None]
    store_setting(model, Setting(2, 4, draft_stop="cost"))
    arguments = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
    expected = model.generate(prompt, **arguments)
    assert torch.equal(layerskip.generate(model, prompt, **arguments, **asked), expected)


@pytest.mark.parametrize("drafting", [AUTO, {**AUTO, "lookup": "hybrid"}, {"exit_layer": 2, "num_draft_tokens": "auto"},
                                      {"exit_layer": "auto", "num_draft_tokens": 3}])  # fmt: skip
def test_coupled_rows_are_what_their_seeds_give_under_any_clock(drafting, wild_clock):
    model = taught(tiny.llama())
    prompts = torch.tensor([[0, 0, 5, 6], [5, 6, 5, 6], [0, 9, 8, 7]])
    arguments = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 30, "do_sample": True, "seed": 3,
                 "acceptance": "coupled"}  # fmt: skip
    expected = layerskip.generate(model, prompts, exit_layer=None, **arguments)
    assert torch.equal(layerskip.generate(model, prompts, **drafting, **arguments), expected)


# --- what it is told, and what it remembers ---


def test_exits_to_choose_from_are_those_the_checkpoint_is_known_for():
    model = tiny.llama(num_layers=20)
    assert [known.exit_layer for known in known_exits(model)] == [2, 4, 7]
    assert not any(known.trained for known in known_exits(model))
    carry(model.config, recipe={"exits": [3, 5]})
    assert [(known.exit_layer, known.trained) for known in known_exits(model)] == [(3, True), (5, True)]
    store_setting(model, Setting(6, 4))
    assert [known.exit_layer for known in known_exits(model)] == [3, 5, 6]
    measured = {str(e): {"agreement": e / 20, "overlap": 0.5} for e in range(1, 20)}
    carry(model.config, exits=measured)
    assert len(known_exits(model)) == 3


def test_a_call_begins_with_what_the_last_one_learnt():
    model = taught(tiny.llama())
    stages, setting = Stages(model, 2), Setting(2, "auto")
    with adaptive_for(stages, setting, sampled=False) as first:
        first._processor = False  # the seconds of `round_of` instead
        for _ in range(30):
            round_of(first, 0.9, 0)
    with adaptive_for(stages, setting, sampled=False) as second:
        assert second is not first
        assert second.prospects[0].judged[0] > 0
    with adaptive_for(stages, setting, sampled=True) as other:
        assert not any(other.prospects[0].judged)
    forget(model)
    with adaptive_for(stages, setting, sampled=False) as fresh:
        assert not any(fresh.prospects[0].judged)
        hopes = [weigher.prospects[0].plan(first.times)[0] for weigher in (first, second, fresh)]
        assert hopes[0] < hopes[1] < hopes[2]  # thirty rounds in vain, what is kept of them, nothing


@pytest.mark.parametrize("drafting", [{"exit_layer": "auto"}, {"exit_layer": 2, "draft_stop": "cost"}])
def test_no_token_may_be_drafted_call_after_call(drafting):
    model, prompt = taught(tiny.llama()), torch.arange(5, 12)[None]
    expected = model.generate(prompt, do_sample=False, max_new_tokens=6)
    for _ in range(2):
        output = layerskip.generate(model, prompt, **drafting, num_draft_tokens=0, do_sample=False, max_new_tokens=6)
        assert torch.equal(output, expected)


def test_the_stop_cost_is_the_same_with_a_limit():
    model = tiny.llama()
    assert Setting(2, 5, draft_stop="cost").weighs
    assert not Setting(2, 5).weighs
    assert not Setting(None, "auto", lookup="only").weighs
    with adaptive_for(Stages(model, 2), Setting(2, 5, draft_stop="cost"), sampled=False) as weigher:
        assert weigher.most == 5


def test_a_checkpoint_may_carry_auto(tmp_path):
    model = tiny.llama()
    store_setting(model, Setting("auto", "auto"))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert tuned_setting(again) == Setting("auto", "auto")
    assert resolve_setting(again, exit_layer=2) == Setting(2, "auto")
    assert resolve_setting(again, num_draft_tokens=3) == Setting("auto", 3)
    assert resolve_setting(again, exit_layer=2, tree=(2, 1)).shape.widths == (2, 1)
    prompt = torch.arange(5, 9)[None]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(layerskip.generate(again, prompt, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"exit_layer": "best"}, "a number of layers, 'auto', or None"),
        ({"num_draft_tokens": "most"}, "or auto"),
        ({"lookup": "branch"}, "use 'hybrid'"),
        ({"tree": (2, 1)}, "give a number"),
        ({"draft_stop": 0.5}, "leave one of the two out"),
        ({"draft_stop": "heuristic", "exit_layer": 2}, "leave one of the two out"),
    ],
)
def test_what_does_not_go_with_auto_is_refused(setting, reason):
    with pytest.raises(ValueError, match=reason):
        Setting(**{**AUTO, **setting})


def test_the_flags_say_the_same():
    parser = argparse.ArgumentParser()
    add_speculation_flags(parser)

    def read(text):
        return SpeculationOptions.read(parser.parse_args(text.split()))

    options = read("--exit-layer auto --num-draft-tokens auto")
    assert (options.exit_layer, options.num_draft_tokens) == ("auto", "auto")
    for others in ("--lookup branch", "--tree 2,1", "--draft-stop 0.3", "--lookup only"):
        with pytest.raises(InputError):
            read(f"--exit-layer auto {others}")
