"""Block verification: the exact law by enumeration, never fewer accepted than by rejection, wrong versions refused."""

import pytest
import torch

from layerskip.exact.acceptance import Walk, chain_walk, leading_true, residual, walk_sampled
from layerskip.exact.block_verification import walk_block
from tests.enumeration import emitted_law, law_of, random_tables, without_replacement

KINDS = [("full", "full"), ("zeros", "zeros"), ("top2", "full"), ("full", "top2"), ("sharp", "full"), ("full", "sharp")]


def block(tokens, parents, valid, q, p, uniforms):
    return walk_block(tokens, valid, q, p, uniforms)


def models(n: int, vocab: int, seed: int, kinds=("full", "full")):
    return random_tables(seed, vocab, n + 1, kinds[0]), random_tables(seed + 1000, vocab, n + 1, kinds[1])


def judged(rule, n: int, target, draft, keep=lambda prefix, siblings: True, scored=None):
    """Largest fault of the law, and the mean number accepted, over chains of n tokens drawn from `draft`."""
    chain = list(range(n))
    law, accepted = emitted_law(rule, chain, without_replacement(chain, draft, keep), target, scored or draft)
    return (law - law_of(target)).abs().max().item(), accepted


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(("n", "vocab"), [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3)])
def test_the_targets_law_and_no_fewer_accepted(n, vocab, kinds):
    gains = []
    for seed in range(3):
        target, draft = models(n, vocab, seed, kinds)
        fault, accepted = judged(block, n, target, draft)
        assert fault < 1e-7
        gains.append(accepted - judged(walk_sampled, n, target, draft)[1])
    assert min(gains) > -1e-7
    if n == 1:
        assert max(gains) < 1e-7  # one token is no block
    elif kinds == ("full", "full"):
        assert max(gains) > 0.01


def test_the_papers_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 accepted, 10/9 by rejection."""
    target, draft = ([torch.tensor(row, dtype=torch.float64) / 3] for row in ([1, 2], [2, 1]))
    target, draft = ([t[0], t[0].expand(2, 2), t[0].expand(2, 2, 2)] for t in (target, draft))
    assert judged(block, 2, target, draft)[1] == pytest.approx(11 / 9)
    assert judged(walk_sampled, 2, target, draft)[1] == pytest.approx(10 / 9)


def stops_early(draft):
    """A draft that ends after token 0, or where it is unsure: known before the token that is not drawn."""
    return lambda prefix, siblings: 0 not in prefix and draft[len(prefix)][prefix].max() < 0.8


@pytest.mark.parametrize("seed", range(4))
def test_rows_may_stop_early(seed):
    target, draft = models(3, 3, seed)
    fault, accepted = judged(block, 3, target, draft, stops_early(draft))
    assert fault < 1e-7
    assert accepted >= judged(walk_sampled, 3, target, draft, stops_early(draft))[1] - 1e-7


def token_wise_residual(tokens, parents, valid, q, p, uniforms):
    """Planted: (p - q)_+ after the block's walk."""
    walk, following = walk_block(tokens, valid, q, p, uniforms)
    rows, k, n = torch.arange(len(tokens)), walk.num_accepted, tokens.shape[1]
    wrong = residual(p[rows, k], q[rows, k.clamp(max=n - 1)])
    return walk, torch.where((k < n)[:, None], wrong, following)


def product_alone(tokens, parents, valid, q, p, uniforms):
    """Planted: the longest prefix with u_i < w_i, the rest as it should be."""
    n, rows = tokens.shape[1], torch.arange(len(tokens))
    ratio = (p[:, :n].gather(2, tokens[..., None]) / q.gather(2, tokens[..., None])).squeeze(2)
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(n):
        w.append((w[-1] * ratio[:, i]).clamp(max=1))
    w = torch.stack(w, 1)
    k = ((uniforms < w[:, 1:]) * torch.arange(1, n + 1)).amax(1)
    rest = residual(w[rows, k][:, None] * p[rows, k], q[rows, k.clamp(max=n - 1)])
    return chain_walk(k, n), torch.where((k < n)[:, None], rest, p[rows, k])


def stops_at_the_first_failure(tokens, parents, valid, q, p, uniforms):
    """Planted: the leading passes instead of the longest prefix that passes."""
    passed = []
    for i in range(tokens.shape[1]):
        only = torch.ones_like(uniforms)
        only[:, i] = uniforms[:, i]
        passed.append(walk_block(tokens, valid, q, p, only)[0].num_accepted == i + 1)
    k, rows = leading_true(torch.stack(passed, 1)), torch.arange(len(tokens))
    return chain_walk(k, tokens.shape[1]), residual(p[rows, k], q[rows, k.clamp(max=tokens.shape[1] - 1)])


def length_ignored(tokens, parents, valid, q, p, uniforms):
    """Planted: a row that stopped early has its last token judged as an inner one."""
    walk, following = walk_block(tokens, torch.ones_like(valid), q, p, uniforms)
    k = torch.minimum(walk.num_accepted, leading_true(valid))
    return Walk(k, walk.path * (walk.path <= k[:, None]), k), following


@pytest.mark.parametrize(
    "wrong", [token_wise_residual, product_alone, stops_at_the_first_failure, length_ignored], ids=lambda f: f.__name__
)
def test_enumeration_refuses_wrong_rules(wrong):
    faults = []
    for seed in range(4):  # where one token alone is left, the residuals agree: hence a vocabulary of 5
        target, draft = models(2, 5, seed)
        keep = stops_early(draft) if wrong is length_ignored else lambda prefix, siblings: True
        faults.append(judged(wrong, 2, target, draft, keep)[0])
    assert max(faults) > 1e-3  # the right rule: < 1e-7


def test_enumeration_refuses_q_at_another_temperature():
    target, draft = models(2, 3, 1)
    warmer = [table.sqrt() / table.sqrt().sum(-1, keepdim=True) for table in draft]
    assert judged(block, 2, target, draft, scored=warmer)[0] > 0.01


def test_enumeration_refuses_a_token_thrown_away_for_its_value():
    target, draft = models(2, 3, 1)
    chain = [0, 1]
    proposals = [x._replace(valid=(True, x.tokens[1] != 2)) for x in without_replacement(chain, draft)]
    law, _ = emitted_law(block, chain, iter(proposals), target, draft)
    assert (law - law_of(target)).abs().max() > 0.005


def float_case(rows: int, n: int, vocab: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    q = (3 * torch.randn(rows, n, vocab, generator=g)).softmax(-1)
    p = (3 * torch.randn(rows, n + 1, vocab, generator=g)).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, n)
    return tokens, q, p, torch.rand(rows, n, generator=g)


def test_rows_are_judged_alone():
    """Also rows of unequal length, beside the same row cut to its length."""
    tokens, q, p, u = float_case(200, 5, 7, 0)
    length = torch.arange(200) % 6
    valid = torch.arange(5) < length[:, None]
    together, following = walk_block(tokens, valid, q, p, u)
    assert (together.num_accepted <= length).all()
    torch.testing.assert_close(following.sum(-1), torch.ones(200))
    for row in range(200):
        cut, whole = slice(0, int(length[row])), slice(0, int(length[row]) + 1)
        one = slice(row, row + 1)
        alone, next_alone = walk_block(tokens[one, cut], valid[one, cut], q[one, cut], p[one, whole], u[one, cut])
        assert alone.num_accepted[0] == together.num_accepted[row] == together.last[row]
        k = int(alone.num_accepted[0])
        assert together.path[row].tolist() == [i + 1 if i < k else 0 for i in range(5)]
        torch.testing.assert_close(next_alone[0], following[row])


def test_point_masses_are_greedy():
    tokens, target = torch.randint(3, (100, 4)), torch.randint(3, (100, 5))
    one_hot = lambda t: torch.nn.functional.one_hot(t, 3).float()  # noqa: E731
    walk, following = walk_block(
        tokens, torch.ones_like(tokens, dtype=torch.bool), one_hot(tokens), one_hot(target), torch.rand(100, 4)
    )
    assert torch.equal(walk.num_accepted, leading_true(tokens == target[:, :4]))
    assert torch.equal(following.argmax(-1), target.gather(1, walk.num_accepted[:, None])[:, 0])


def test_equal_distributions_accept_everything():
    tokens, q, p, u = float_case(500, 4, 9, 1)
    p = torch.cat([q, p[:, 4:]], 1)
    walk, following = walk_block(tokens, torch.ones_like(tokens, dtype=torch.bool), q, p, u)
    assert walk.num_accepted.tolist() == [4] * 500
    assert torch.equal(following, p[:, 4])


def test_nothing_drafted():
    p = torch.rand(2, 1, 5).softmax(-1)
    walk, following = walk_block(
        torch.empty(2, 0, dtype=torch.long), torch.empty(2, 0, dtype=torch.bool), p[:, :0], p, torch.empty(2, 0)
    )
    assert walk.num_accepted.tolist() == walk.last.tolist() == [0, 0]
    assert torch.equal(following, p[:, 0])
