"""Candidate trees: the exact law of what is emitted, by enumeration; it refuses wrong drafts and wrong rules."""

from itertools import product

import pytest
import torch

from layerskip.exact.acceptance import Walk, accept_sampled, walk_sampled
from tests.distributions import chi_square_p_value
from tests.enumeration import TREES, Proposal, emitted_law, law_of, models, random_trees, without_replacement

KINDS = [("full", "full"), ("zeros", "zeros"), ("top2", "full"), ("full", "top2"), ("sharp", "full"), ("full", "sharp")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("tree", TREES)
def test_sampled_trees_have_the_targets_law(tree, kinds):
    parents, vocab = TREES[tree]
    target, draft = models(parents, vocab, KINDS.index(kinds), kinds)
    law, accepted = emitted_law(walk_sampled, parents, without_replacement(parents, draft), target, draft)
    torch.testing.assert_close(law, law_of(target), atol=1e-7, rtol=0)
    assert accepted > 0


@pytest.mark.parametrize("tree", TREES)
def test_a_draft_equal_to_the_target_is_always_accepted(tree):
    parents, vocab = TREES[tree]
    target, _ = models(parents, vocab, 5, ("zeros", "full"))
    law, accepted = emitted_law(walk_sampled, parents, without_replacement(parents, target), target, target)
    torch.testing.assert_close(law, law_of(target), atol=1e-7, rtol=0)
    # The first child of every node is accepted; its path is as deep as the tree, or a shallower branch's end.
    firsts, node = 0, 0
    while node in parents:
        firsts, node = firsts + 1, parents.index(node) + 1
    assert accepted == pytest.approx(firsts)


@pytest.mark.parametrize("tree", TREES)
def test_trees_may_grow_by_what_was_drawn_before(tree):
    """Whether a node exists may depend on its ancestors, on siblings before it, and on q: rows differ in `valid`."""
    parents, vocab = TREES[tree]
    target, draft = models(parents, vocab, 8)

    def keep(prefix, siblings):
        return 0 not in siblings and prefix[:1] != (1,) and draft[len(prefix)][prefix].max() < 0.8

    law, _ = emitted_law(walk_sampled, parents, without_replacement(parents, draft, keep), target, draft)
    torch.testing.assert_close(law, law_of(target), atol=1e-7, rtol=0)


def sorted_by_q(parents, draft):
    """Planted: the siblings below the root verified by falling q, not as they were drawn."""
    for proposal in without_replacement(parents, draft):
        assert set(parents) == {0}
        yield proposal._replace(tokens=tuple(sorted(proposal.tokens, key=lambda x: -draft[0][x].item())))


def independent(parents, draft, merged: bool):
    """Children of the root drawn from q each for itself; merged: one that repeats a sibling is not there."""
    for drawn in product(range(len(draft[0])), repeat=len(parents)):
        fresh = tuple(not merged or x not in drawn[:i] for i, x in enumerate(drawn))
        yield Proposal(float(draft[0][list(drawn)].prod()), drawn, fresh)


def test_known_numbers():
    """p = (.5, .3, .2), q = (.2, .2, .6), two children: what is exact, and two famous mistakes in fractions."""
    target, draft = ([torch.tensor(row, dtype=torch.float64)] for row in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))

    def first_token(proposals, rule=walk_sampled):
        law, _ = emitted_law(rule, [0, 0], proposals, [*target, target[0].expand(3, 3)], draft)
        return [round(x, 6) for x in law.sum(1).tolist()]

    with_replacement = lambda *arguments: naive(*arguments, wrong="earlier siblings stay in q")  # noqa: E731
    assert first_token(without_replacement([0, 0], draft)) == [0.5, 0.3, 0.2]
    assert first_token(sorted_by_q([0, 0], draft)) == [0.5, 0.2, 0.3]
    assert first_token(independent([0, 0], draft, merged=False), with_replacement) == [0.5, 0.3, 0.2]
    assert first_token(independent([0, 0], draft, merged=True), with_replacement) == [0.46, 0.34, 0.2]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("tree", ["siblings", "three"])
def test_independent_children_may_repeat_each_other(tree, merged):
    """A repeated sibling is passed over, marked or not: what is left are draws without replacement."""
    parents, vocab = TREES[tree]
    target, draft = models(parents, vocab, 3)
    law, _ = emitted_law(walk_sampled, parents, independent(parents, draft, merged), target, draft)
    torch.testing.assert_close(law, law_of(target), atol=1e-7, rtol=0)


def thrown_away(parents, draft):
    """Planted: a drawn token is left out because of its value."""
    for proposal in without_replacement(parents, draft):
        yield proposal._replace(valid=tuple(x != 2 for x in proposal.tokens))


@pytest.mark.parametrize("wrong", [sorted_by_q, thrown_away])
def test_enumeration_refuses_wrong_drafts(wrong):
    target, draft = models([0, 0], 3, 3)
    law, _ = emitted_law(walk_sampled, [0, 0], wrong([0, 0], draft), target, draft)
    assert (law - law_of(target)).abs().max() > 0.01


def naive(tokens, parents, valid, q, p, uniforms, wrong: str = ""):
    """The rule as its docstring says it, one row at a time; `wrong` plants a bug."""
    walks, following = [], []
    for b in range(len(tokens)):
        node, path, left = 0, [], p[b, 0]
        while True:
            children = [i for i in range(tokens.shape[1]) if parents[b, i] == node and valid[b, i]]
            draft, stayed = q[b, node] if children else None, None
            for i in children:
                x = tokens[b, i]
                if draft[x] > 0:
                    q_i = draft if wrong == "earlier siblings stay in q" else draft / draft.sum()
                    if uniforms[b, i] * q_i[x] < left[x]:
                        stayed = i + 1
                        break
                    excess = (q_i - left if wrong == "sides swapped" else left - q_i).clamp(min=0)
                    if wrong == "residual not renormalised":
                        left = excess
                    elif wrong != "residual forgotten" and excess.sum() > 0:
                        left = excess / excess.sum()
                if wrong != "earlier siblings stay in q":
                    draft = draft.index_fill(0, x, 0)
            if stayed is None:
                break
            node, left = stayed, p[b, stayed]
            path.append(node)
        walks.append((len(path), path + [0] * (tokens.shape[1] - len(path)), node))
        following.append(left / left.sum())
    counts, paths, last = zip(*walks, strict=True)
    return Walk(torch.tensor(counts), torch.tensor(paths), torch.tensor(last)), torch.stack(following)


@pytest.mark.parametrize(
    "wrong", ["earlier siblings stay in q", "residual not renormalised", "residual forgotten", "sides swapped"]
)
def test_enumeration_refuses_wrong_tree_rules(wrong):
    target, draft = models([0, 0], 3, 2)
    planted = lambda *arguments: naive(*arguments, wrong=wrong)  # noqa: E731
    for rule, right in ((naive, True), (planted, False)):
        law, _ = emitted_law(rule, [0, 0], without_replacement([0, 0], draft), target, draft)
        assert ((law - law_of(target)).abs().max() < 1e-7) == right


@pytest.mark.parametrize("tree", ["siblings", "chain"])
def test_enumeration_refuses_q_at_another_temperature(tree):
    parents, vocab = TREES[tree]
    target, draft = models(parents, vocab, 4)
    warmer = [table.sqrt() / table.sqrt().sum(-1, keepdim=True) for table in draft]
    law, _ = emitted_law(walk_sampled, parents, without_replacement(parents, draft), target, warmer)
    assert (law - law_of(target)).abs().max() > 0.01


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_random_trees_are_judged_as_one_row_at_a_time(n):
    arguments = random_trees(300, n, 4, n)
    walk, following = walk_sampled(*arguments)
    expected, expected_following = naive(*arguments)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(walk, expected, strict=True))
    torch.testing.assert_close(following, expected_following)
    torch.testing.assert_close(following.sum(-1), torch.ones(300))


@pytest.mark.parametrize("general", [False, True])
def test_a_chain_of_one_child_each_is_leviathans_rule(general):
    """Equal to the last bit, 1000 times; also without the short cut for chains (one more node that is not there)."""
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 6):
        q = (3 * torch.randn(200, n, 7, generator=generator)).softmax(-1)
        p = (3 * torch.randn(200, n + 1, 7, generator=generator)).softmax(-1)
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(200, n)
        u = torch.rand(200, n, generator=generator)
        verdict = accept_sampled(tokens, q, p, u)
        parents, valid = torch.arange(n).expand(200, n), torch.ones(200, n, dtype=torch.bool)
        if general:
            pad = lambda x, value: torch.nn.functional.pad(x, (0, 1), value=value)  # noqa: E731
            tokens, parents, valid, u = pad(tokens, 0), pad(parents, 0), pad(valid, False), pad(u, 0.0)
            p = torch.cat([p, p[:, :1]], 1)
        walk, following = walk_sampled(tokens, parents, valid, q, p, u)
        assert torch.equal(walk.num_accepted, verdict.num_accepted)
        assert torch.equal(walk.last, verdict.num_accepted)
        assert torch.equal(following, verdict.next_probabilities)
        assert walk.path[:, :n].tolist() == [[i + 1 if i < k else 0 for i in range(n)] for k in walk.num_accepted]


def test_chains_of_unequal_length():
    """A row whose draft ended early and was kept whole draws from p there, not from a residual."""
    tokens, u = torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
    q, p = torch.full((3, 2, 2), 0.5), torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]).expand(3, 3, 2)
    valid = torch.tensor([[False, False], [True, False], [True, True]])
    for width in (2, 1):  # where no row has a second token, q may stop before it
        rows = slice(0, width + 1)
        walk, following = walk_sampled(
            tokens[rows], torch.arange(2).expand(3, 2)[rows], valid[rows], q[rows, :width], p[rows], u[rows]
        )
        assert walk.num_accepted.tolist() == [0, 1, 2][rows]
        torch.testing.assert_close(following, p[0][rows])


def test_no_candidates():
    p = torch.rand(2, 1, 5).softmax(-1)
    none, never = torch.empty(2, 0, dtype=torch.long), torch.empty(2, 0, dtype=torch.bool)
    walk, following = walk_sampled(none, none, never, p[:, :0], p, torch.empty(2, 0))
    assert (walk.num_accepted.tolist(), walk.path.shape, walk.last.tolist()) == ([0, 0], (2, 0), [0, 0])
    assert torch.equal(following, p[:, 0])


ROWS = 60_000


def simulate(rule=walk_sampled, *, order=None, seed=0) -> float:
    """p-value of the first two tokens of 60,000 rounds on the tree [0, 0, 0, 1, 1], V = 5, against the target."""
    parents, vocab = [0, 0, 0, 1, 1], 5
    target, draft = ([t.float() for t in tables] for tables in models(parents, vocab, 11, ("full", "sharp")))
    g = torch.Generator().manual_seed(seed)
    q0 = draft[0].expand(ROWS, vocab)
    drawn = torch.multinomial(q0, 3, generator=g)  # (R, 3), in the order drawn
    if order is not None:
        drawn = drawn.gather(1, order(q0.gather(1, drawn)))
    q1 = draft[1][drawn[:, 0]]  # (R, V)
    tokens = torch.cat([drawn, torch.multinomial(q1, 2, generator=g)], 1)  # (R, 5)
    q = torch.stack([q0, q1], 1)
    p = torch.stack([target[0].expand(ROWS, vocab), *target[1][drawn].unbind(1)], 1)  # (R, 4, V)
    p = torch.cat([p, *(target[2][tokens[:, 0], tokens[:, i]][:, None] for i in (3, 4))], 1)  # (R, 6, V)
    u = torch.rand(ROWS, 5, generator=g)
    walk, following = rule(tokens, torch.tensor(parents).expand(ROWS, 5), torch.ones(ROWS, 5).bool(), q, p, u)
    after = torch.multinomial(following, 1, generator=g)[:, 0]
    own = tokens.gather(1, (walk.path[:, :2] - 1).clamp(min=0))  # (R, 2), where accepted
    first = torch.where(walk.num_accepted > 0, own[:, 0], after)
    later = torch.multinomial(target[1][first], 1, generator=g)[:, 0]  # the next round's
    second = torch.where(walk.num_accepted > 1, own[:, 1], torch.where(walk.num_accepted == 1, after, later))
    law = target[0][:, None] * target[1]
    expected = {(y, z): float(law[y, z]) for y in range(vocab) for z in range(vocab)}
    return chi_square_p_value(list(zip(first.tolist(), second.tolist(), strict=True)), expected)


def test_simulated_rounds_are_samples_of_the_target():
    assert min(simulate(seed=seed) for seed in range(3)) > 1e-3


@pytest.mark.parametrize(
    "planted",
    [
        {"order": lambda q: q.argsort(1, descending=True)},
        {"rule": lambda t, par, v, q, p, u: walk_sampled(t, par, v, q.sqrt() / q.sqrt().sum(-1, keepdim=True), p, u)},
    ],
    ids=["sorted by q", "another temperature"],
)
def test_simulation_refuses_wrong_rounds(planted):
    assert simulate(**planted) < 1e-6
