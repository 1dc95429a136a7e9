"""The loop: scripted drafts pin what it commits, chi-square what it samples, invariants what it leaves behind."""

from itertools import product

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from layerskip.decode.decoding import decode
from layerskip.draft import drafters
from layerskip.draft.draft_stop import DraftStop, Heuristic
from layerskip.draft.drafters import ExitDrafter, LookupDrafter, NoDrafter
from layerskip.draft.drafting import chain_of, draft_chain
from layerskip.exact import rules
from layerskip.exact.acceptance import walk_sampled
from layerskip.exact.sampling import Sampler
from layerskip.model.stages import Stages
from layerskip.model.tree import Shape, parse_shape
from tests import tiny
from tests.distributions import chi_square_p_value
from tests.scripted import ScriptedCache, ScriptedStages, adaptive, random_table

V = 4


def never_stop(committed, new):
    return new.shape[1], False


def say(*tokens: int, vocab: int = 10):
    """Logits that say the given tokens one after another, whatever came before, after a prompt of one."""
    return lambda prefix: torch.nn.functional.one_hot(
        torch.tensor(tokens[(len(prefix) - 1) % len(tokens)]), vocab
    ).float()


def chain(num_draft_tokens):
    return ExitDrafter(Shape((1,) * num_draft_tokens))


def run(target, draft, n, num_draft_tokens, sampler=None, stop=never_stop, prompt=(0,), drafter=None):
    stages, cache = ScriptedStages(target, draft), ScriptedCache()
    drafter = drafter or chain(num_draft_tokens)
    prompts, max_length = torch.tensor([prompt]), len(prompt) + n
    decoded = decode(stages, prompts, sampler or Sampler(), stop, drafter=drafter, max_length=max_length, cache=cache)
    steps = list(decoded)
    return [token for step in steps for token in step.tokens[0].tolist()], steps, stages


def run_rows(target, draft, n, sampler, drafter, prompts):
    """Rows of tokens; `n` new ones for the longest prompt, so that all end at the same length."""
    stages, cache = ScriptedStages(target, draft), ScriptedCache(len(prompts))
    rows = [[] for _ in prompts]
    tensors, longest = [torch.tensor(prompt) for prompt in prompts], max(map(len, prompts)) + n
    for step in decode(stages, tensors, sampler, never_stop, drafter=drafter, max_length=longest, cache=cache):
        rows[step.row] += step.tokens[0].tolist()
    return rows


def test_a_draft_that_is_always_right():
    tokens, steps, stages = run(say(1, 2, 3, 4, 5), say(1, 2, 3, 4, 5), n=10, num_draft_tokens=4)
    assert tokens == [1, 2, 3, 4, 5] * 2
    assert [(s.num_drafted, s.num_accepted, s.tokens.shape[1]) for s in steps] == [(4, 4, 5), (4, 4, 5)]
    assert stages.verified == [5, 5]


def test_a_draft_that_is_never_right():
    tokens, steps, _ = run(say(1, 2, 3, 4, 5), say(9), n=5, num_draft_tokens=3)
    assert tokens == [1, 2, 3, 4, 5]
    assert [s.num_accepted for s in steps] == [0] * 5
    assert [s.num_drafted for s in steps] == [3, 3, 2, 1, 0]  # never more than could be committed


def test_a_draft_that_is_sometimes_right():
    tokens, steps, _ = run(say(1, 2, 3, 4, 5, 6), say(1, 2, 9, 4, 5, 9), n=6, num_draft_tokens=3)
    assert tokens == [1, 2, 3, 4, 5, 6]
    assert [(s.num_accepted, s.tokens.shape[1]) for s in steps] == [(2, 3), (2, 3)]


def test_a_stop_cuts_inside_an_accepted_block():
    def stop(committed, new):
        at = (new[0] == 3).nonzero()
        return (int(at[0]) + 1, True) if len(at) else (new.shape[1], False)

    tokens, steps, _ = run(say(1, 2, 3, 4, 5), say(1, 2, 3, 4, 5), n=50, num_draft_tokens=4, stop=stop)
    assert tokens == [1, 2, 3]
    assert len(steps) == 1


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5])
def test_length_is_exact(num_draft_tokens):
    for n in range(1, 8):
        tokens, _, _ = run(say(1, 2, 3), say(1, 2, 3), n=n, num_draft_tokens=num_draft_tokens)
        assert len(tokens) == n


# --- the law of what is sampled ---


def law_of_three(target, sampler) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation of three tokens, by enumeration under the same processors."""
    law = {}
    for tokens in product(range(V), repeat=3):
        probability, prefix = 1.0, (0,)
        for token in tokens:
            scores = sampler.process(target(prefix)[None, None], lambda _, prefix=prefix: torch.tensor([prefix]))
            probability *= float(scores.softmax(-1)[0, 0, token])
            prefix += (token,)
        law[tokens] = probability
    return law


def samples_of_three(target, draft, sampler, n, num_draft_tokens=2, drafter=None, batch=100):
    """Continuations of three tokens, many rows at once: rows are independent, which `run_rows` relies on and shows."""
    torch.manual_seed(1)
    drafter = drafter or chain(num_draft_tokens)
    if batch == 1:
        return [tuple(run(target, draft, 3, num_draft_tokens, sampler, drafter=drafter)[0]) for _ in range(n)]
    samplers = sampler if callable(sampler) else lambda _: sampler
    rounds = [run_rows(target, draft, 3, samplers(i), drafter, [(0,)] * batch) for i in range(n // batch)]
    return [tuple(row) for rows in rounds for row in rows]


SAMPLERS = {
    "plain": LogitsProcessorList(),
    "temperature": LogitsProcessorList([TemperatureLogitsWarper(0.7)]),
    "penalty": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(1.3)]),
    "top-k": LogitsProcessorList([TopKLogitsWarper(2)]),
    "top-p": LogitsProcessorList([TopPLogitsWarper(0.8)]),
    "min-p": LogitsProcessorList([MinPLogitsWarper(0.3)]),
    "typical": LogitsProcessorList([TypicalLogitsWarper(0.6)]),
    "n-gram": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]),
    "bias": LogitsProcessorList([SequenceBiasLogitsProcessor([[[1, 2], 2.0], [[3], -1.0]])]),
    "bad words": LogitsProcessorList([NoBadWordsLogitsProcessor([[2], [1, 3]])]),
}
DRAFTERS = {
    "chain 1": lambda: chain(1),
    "chain 3": lambda: chain(3),
    "tree 2,2": lambda: ExitDrafter(parse_shape((2, 2))),
    "tree 3,1,1": lambda: ExitDrafter(parse_shape((3, 1, 1))),
    "dynamic tree": lambda: ExitDrafter(parse_shape("s3_k2_d4")),
    "lookup": lambda: LookupDrafter(2, None, branch=False),
    "hybrid": lambda: LookupDrafter(2, Shape((1, 1)), branch=False),
    "branch": lambda: LookupDrafter(2, parse_shape((2, 1)), branch=True),
    "stop": lambda: ExitDrafter(Shape((1, 1, 1)), DraftStop(3, 0.5)),
    "heuristic stop": lambda: ExitDrafter(Shape((1, 1, 1)), Heuristic(3, start=1)),
    "adaptive": lambda: ExitDrafter(Shape((1, 1, 1)), adaptive(3)),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drafter", ["chain 3", "tree 2,2"])
def test_sampled_continuations_have_the_targets_law(name, drafter):
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    sampler = Sampler(SAMPLERS[name], do_sample=True)
    samples = samples_of_three(target, draft, sampler, 2000, drafter=DRAFTERS[drafter]())
    assert chi_square_p_value(samples, law_of_three(target, sampler)) > 1e-4


RULES = [
    (drafter, rule)
    for drafter in DRAFTERS
    for rule in ("rejection", "block", "coupled")
    if rule != "block" or drafter not in ("tree 2,2", "tree 3,1,1", "branch")  # it judges chains
]


@pytest.mark.parametrize(("drafter", "acceptance"), RULES)
def test_every_drafter_under_every_rule_has_the_targets_law(drafter, acceptance):
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    processors = SAMPLERS["penalty"]

    def sampler(i):
        return Sampler(processors, do_sample=True, acceptance=acceptance, seeds=tuple(range(100 * i, 100 * i + 100)))

    samples = samples_of_three(target, draft, sampler, 1200, drafter=DRAFTERS[drafter]())
    assert chi_square_p_value(samples, law_of_three(target, sampler(0))) > 1e-4


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_single_row_has_the_targets_law(acceptance):
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    sampler = Sampler(SAMPLERS["temperature"], do_sample=True, acceptance=acceptance)
    samples = samples_of_three(target, draft, sampler, 1500, 2, batch=1)
    assert chi_square_p_value(samples, law_of_three(target, sampler)) > 1e-4


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_say_what_they_say_alone(drafter, seed):
    """Greedy and coupled rows side by side, prompts of unequal length: each as in plain decoding by itself."""
    target, draft = random_table(8, seed=seed), random_table(8, seed=seed + 50, sharpness=1.0)
    prompts = [(1, 2, 3), (4,), (5, 6, 5, 6, 5), (7, 7)]
    coupled = Sampler(do_sample=True, acceptance="coupled", seeds=(3, 4, 5, 6))
    samplers = [Sampler(), coupled, Sampler(SAMPLERS["penalty"]), coupled]
    rows = run_rows(target, draft, 12, samplers, DRAFTERS[drafter](), prompts)
    longest = max(map(len, prompts)) + 12
    for i, prompt in enumerate(prompts):
        alone = Sampler(do_sample=True, acceptance="coupled", seeds=(3 + i,)) if samplers[i] is coupled else samplers[i]
        expected = run(target, draft, longest - len(prompt), 0, alone, prompt=prompt, drafter=NoDrafter())[0]
        assert rows[i] == expected


def test_rejection_accepts_more_with_a_tree_and_with_a_better_draft():
    """At equal depth: a second child can only help; the target's own distribution is always accepted."""
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    sampler = Sampler(do_sample=True)

    def accepted(draft, drafter):
        return sum(run(target, draft, 3, 0, sampler, drafter=drafter)[1][0].num_accepted for _ in range(300)) / 300

    narrow, wide = accepted(draft, chain(2)), accepted(draft, ExitDrafter(parse_shape((2, 2))))
    assert narrow < wide < accepted(target, chain(2)) == 2


def wrong_residual(monkeypatch):
    def rule(tokens, parents, valid, q, p, uniforms):
        walk, _ = walk_sampled(tokens, parents, valid, q, p, uniforms)
        return walk, p[torch.arange(len(p)), walk.last]

    monkeypatch.setattr(rules, "walk_sampled", rule)


def q_at_another_temperature(monkeypatch):
    def chain(*args):
        draft = draft_chain(*args)
        if draft.probabilities is not None:
            draft.probabilities = (draft.probabilities.log() / 0.6).softmax(-1)
        return draft

    monkeypatch.setattr(drafters, "draft_chain", chain)


def draft_dropped_for_its_own_value(monkeypatch):
    """Anticipating: a sampled token the draft itself finds unlikely is thrown away, and all after it."""

    def chain(*args):
        draft = draft_chain(*args)
        if draft.probabilities is None:
            return draft
        likely = draft.probabilities.gather(2, draft.tokens[..., None])[0, :, 0] > 0.4
        n = int(likely.long().cumprod(0).sum())
        cache, rows = args[1], args[2]
        del cache.early[0][len(cache.late[0]) + n + 1 :]
        return chain_of(rows, draft.tokens[:, :n], draft.hidden[:, : n + 1], draft.probabilities[:, :n])

    monkeypatch.setattr(drafters, "draft_chain", chain)


@pytest.mark.parametrize("plant", [wrong_residual, q_at_another_temperature, draft_dropped_for_its_own_value])
def test_the_same_test_refuses_planted_bugs(monkeypatch, plant):
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    sampler = Sampler(do_sample=True)
    plant(monkeypatch)
    samples = samples_of_three(target, draft, sampler, 2500, batch=1)
    assert chi_square_p_value(samples, law_of_three(target, sampler)) < 1e-6


def test_a_real_models_continuations_have_its_law():
    """The whole chain of parts: a real cut model, its cache and its own logits."""
    model = tiny.llama(num_layers=2, vocab_size=V, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    stages, sampler = (
        Stages(model, 1),
        Sampler(LogitsProcessorList([TemperatureLogitsWarper(1.5)]), do_sample=True),
    )

    @torch.no_grad()
    def target(prefix):
        return model(input_ids=torch.tensor([prefix])).logits[0, -1]

    samples = []
    for _ in range(1500):
        steps = decode(
            stages,
            torch.tensor([[0]]),
            sampler,
            never_stop,
            drafter=chain(2),
            max_length=4,
            cache=stages.new_cache(8),
        )
        samples.append(tuple(token for step in steps for token in step.tokens[0].tolist()))
    assert chi_square_p_value(samples, law_of_three(target, sampler)) > 1e-4


def test_a_seeded_generator_reproduces():
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    runs = [
        run(target, draft, 12, 3, Sampler(do_sample=True, generator=torch.Generator().manual_seed(7)))[0]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


# --- what is left behind ---


@pytest.mark.parametrize("abandon_after", [0, 1, 3])
def test_an_abandoned_generator_leaves_a_consistent_cache(tiny_llama, abandon_after):
    stages = Stages(tiny_llama, 2)
    cache, prompt = stages.new_cache(4), torch.randint(3, 64, (1, 6))
    steps = decode(stages, prompt, Sampler(), never_stop, drafter=chain(3), max_length=60, cache=cache)
    committed = prompt
    for _ in range(abandon_after):
        committed = torch.cat([committed, next(steps).tokens], dim=1)
    steps.close()
    assert cache.length == (committed.shape[1] - 1 if abandon_after else 0)
    # What it holds is right: decoding on from it gives what decoding from nothing gives.
    again = decode(stages, committed, Sampler(), never_stop, drafter=chain(3), max_length=60, cache=cache)
    whole = torch.cat([committed, *[step.tokens for step in again]], dim=1)
    expected = tiny_llama.generate(
        prompt, do_sample=False, max_length=60, eos_token_id=None, attention_mask=torch.ones_like(prompt)
    )
    assert torch.equal(whole, expected)


def test_an_error_inside_a_round_leaves_a_consistent_cache(tiny_llama, monkeypatch):
    stages = Stages(tiny_llama, 2)
    cache, prompt = stages.new_cache(4), torch.randint(3, 64, (1, 6))
    steps = decode(stages, prompt, Sampler(), never_stop, drafter=chain(3), max_length=60, cache=cache)
    n = 6 + next(steps).tokens.shape[1]
    monkeypatch.setattr(stages, "verify", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        next(steps)
    assert cache.length == n - 1


def test_an_error_inside_the_prefill_leaves_a_consistent_cache(tiny_llama):
    stages = Stages(tiny_llama, 2)
    cache, prompt = stages.new_cache(4), torch.randint(3, 64, (1, 6))
    stages.prefill(prompt[:, :2], cache)
    hook = tiny_llama.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
    steps = decode(stages, prompt, Sampler(), never_stop, drafter=chain(3), max_length=60, cache=cache)
    with pytest.raises(MemoryError):
        next(steps)
    hook.remove()
    assert cache.length == 2


def test_gradients_stay_as_the_caller_had_them(tiny_llama):
    stages = Stages(tiny_llama, 2)
    steps = decode(
        stages,
        torch.randint(3, 64, (1, 6)),
        Sampler(),
        never_stop,
        drafter=chain(2),
        max_length=20,
        cache=stages.new_cache(),
    )
    next(steps)
    assert torch.is_grad_enabled()
