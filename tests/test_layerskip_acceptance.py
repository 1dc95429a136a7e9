"""The exact rule: proved by enumeration, and the same enumeration refuses wrong rules."""

from itertools import product

import pytest
import torch

from layerskip.exact import acceptance
from layerskip.exact.acceptance import Verdict, accept_greedy, accept_sampled, leading_true, residual

V = 3
QUARTERS = [torch.tensor(row) / 4 for row in ([2, 1, 1], [1, 2, 1], [1, 1, 2], [3, 1, 0], [0, 1, 3], [4, 0, 0])]
GRID = 12  # acceptance thresholds p/q of quarters are multiples of 1/12, so midpoints integrate u exactly


def enumerate_two_tokens(rule, p1, p2, q1, q2) -> torch.Tensor:
    """Exact law (V, V) of the first two tokens when two are drafted; p2, q2 are (V, V): given the first."""
    midpoints = (torch.arange(GRID) + 0.5) / GRID
    uniforms = torch.cartesian_prod(midpoints, midpoints)  # (GRID^2, 2)
    law = torch.zeros(V, V, dtype=torch.float64)
    for x1, x2 in product(range(V), repeat=2):
        weight = float(q1[x1] * q2[x1, x2])
        if weight == 0:
            continue
        rows = len(uniforms)
        tokens = torch.tensor([[x1, x2]]).expand(rows, 2)
        q = torch.stack([q1, q2[x1]])[None].expand(rows, 2, V)
        p = torch.stack([p1, p2[x1], torch.ones(V) / V])[None].expand(rows, 3, V)
        verdict = rule(tokens, q, p, uniforms)
        for accepted, following in zip(verdict.num_accepted.tolist(), verdict.next_probabilities, strict=True):
            share = weight / rows
            if accepted == 0:  # the second token comes from the next round, which is exact by induction
                law += share * following[:, None] * p2
            elif accepted == 1:
                law[x1] += share * following
            else:
                law[x1, x2] += share
    return law


def tables(seed: int):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda: QUARTERS[int(torch.randint(len(QUARTERS), (1,), generator=generator))]  # noqa: E731
    return pick(), torch.stack([pick() for _ in range(V)]), pick(), torch.stack([pick() for _ in range(V)])


@pytest.mark.parametrize("seed", range(25))
def test_two_drafted_tokens_have_the_targets_law(seed):
    p1, p2, q1, q2 = tables(seed)
    law = enumerate_two_tokens(accept_sampled, p1, p2, q1, q2)
    torch.testing.assert_close(law, (p1[:, None] * p2).double(), atol=1e-6, rtol=0)


def no_residual(tokens, q, p, uniforms) -> Verdict:
    """Planted: after a rejection draws from p instead of the residual."""
    verdict = accept_sampled(tokens, q, p, uniforms)
    return Verdict(verdict.num_accepted, p[torch.arange(len(p)), verdict.num_accepted])


def swapped(tokens, q, p, uniforms) -> Verdict:
    """Planted: residual of q over p."""
    verdict = accept_sampled(tokens, q, p, uniforms)
    n = verdict.num_accepted.clamp(max=1)
    rows = torch.arange(len(p))
    wrong = residual(q[rows, n], p[rows, n])
    keep = (verdict.num_accepted == 2)[:, None]
    return Verdict(verdict.num_accepted, torch.where(keep, verdict.next_probabilities, wrong))


def lenient(tokens, q, p, uniforms) -> Verdict:
    """Planted: accepts a little too gladly."""
    return accept_sampled(tokens, q, p, uniforms * 0.8)


@pytest.mark.parametrize("wrong_rule", [no_residual, swapped, lenient])
def test_enumeration_refuses_wrong_rules(wrong_rule):
    p1, p2, q1, q2 = QUARTERS[0], torch.stack(QUARTERS[:3]), QUARTERS[1], torch.stack(QUARTERS[1:4])
    law = enumerate_two_tokens(wrong_rule, p1, p2, q1, q2)
    assert (law - p1[:, None] * p2).abs().max() > 0.01


def test_textbook_example():
    """p = (.5, .3, .2), q = (.6, .1, .3): acceptance .8, the residual all on the second token."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.1, 0.3])
    assert torch.minimum(p, q).sum().item() == pytest.approx(0.8)
    torch.testing.assert_close(residual(p, q), torch.tensor([0.0, 1.0, 0.0]))


def test_residual_of_equal_distributions_is_the_target():
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    torch.testing.assert_close(residual(p, p), p)
    nearly = residual(p, p * (1 + 1e-7))  # p <= q everywhere after rounding
    assert torch.isfinite(nearly).all()
    torch.testing.assert_close(nearly.sum(-1), torch.ones(2))


def test_equal_distributions_accept_everything():
    p = torch.rand(5, 4, 7).softmax(-1)
    q = p[:, :3]
    tokens = torch.randint(7, (5, 3))
    verdict = accept_sampled(tokens, q, p, torch.rand(5, 3))
    assert verdict.num_accepted.tolist() == [3] * 5
    torch.testing.assert_close(verdict.next_probabilities, p[:, 3])


def test_no_draft_is_plain_sampling():
    p = torch.rand(2, 1, 5).softmax(-1)
    verdict = accept_sampled(torch.empty(2, 0, dtype=torch.long), p[:, :0], p, torch.empty(2, 0))
    assert verdict.num_accepted.tolist() == [0, 0]
    torch.testing.assert_close(verdict.next_probabilities, p[:, 0])


def test_rows_are_judged_alone():
    p, q, tokens, u = (
        torch.rand(6, 4, 5).softmax(-1),
        torch.rand(6, 3, 5).softmax(-1),
        torch.randint(5, (6, 3)),
        torch.rand(6, 3),
    )
    together = accept_sampled(tokens, q, p, u)
    for row in range(6):
        alone = accept_sampled(tokens[row : row + 1], q[row : row + 1], p[row : row + 1], u[row : row + 1])
        assert alone.num_accepted[0] == together.num_accepted[row]
        torch.testing.assert_close(alone.next_probabilities[0], together.next_probabilities[row])


def test_impossible_tokens_are_rejected():
    """A token the target can never say is refused whatever the draw; u = 0 included."""
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    verdict = accept_sampled(torch.tensor([[0]]), q, p, torch.zeros(1, 1))
    assert verdict.num_accepted.item() == 0
    torch.testing.assert_close(verdict.next_probabilities, torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize(
    ("draft", "target", "accepted", "following"),
    [([1, 2, 3], [1, 2, 3, 4], 3, 4), ([1, 2, 3], [1, 9, 3, 4], 1, 9), ([1], [7, 8], 0, 7), ([], [5], 0, 5)],
)
def test_greedy(draft, target, accepted, following):
    num_accepted, next_token = accept_greedy(torch.tensor([draft], dtype=torch.long), torch.tensor([target]))
    assert (num_accepted.item(), next_token.item()) == (accepted, following)


def test_greedy_is_the_sampled_rule_for_point_masses():
    tokens, target = torch.randint(4, (20, 3)), torch.randint(4, (20, 4))
    one_hot = lambda t: torch.nn.functional.one_hot(t, 4).float()  # noqa: E731
    verdict = accept_sampled(tokens, one_hot(tokens), one_hot(target), torch.rand(20, 3))
    num_accepted, next_token = accept_greedy(tokens, target)
    assert torch.equal(verdict.num_accepted, num_accepted)
    assert torch.equal(verdict.next_probabilities.argmax(-1, keepdim=True), next_token)


def test_leading_true():
    flags = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert leading_true(flags).tolist() == [2, 0, 4]


def test_the_module_knows_no_model():
    assert not {"transformers", "layerskip.model.stages"} & set(vars(acceptance))


@pytest.mark.parametrize("shared", ["", "drafting and accepting", "drafting and resampling"])
def test_noise_is_not_shared(shared):
    """One drafted token; all draws by inversion, integrated over a grid of the uniforms."""
    p, q = torch.tensor([0.6, 0.1, 0.3]), torch.tensor([0.2, 0.6, 0.2])
    grid = (torch.arange(60) + 0.5) / 60
    draw, accept, resample = torch.cartesian_prod(grid, grid, grid).unbind(1)
    accept = draw if shared == "drafting and accepting" else accept
    resample = draw if shared == "drafting and resampling" else resample
    by_inversion = lambda law, u: (law.cumsum(-1) < u[:, None]).sum(1, keepdim=True).clamp(max=2)  # noqa: E731
    rows, tokens = len(draw), by_inversion(q, draw)  # tokens (R, 1)
    verdict = accept_sampled(tokens, q.expand(rows, 1, 3), p.expand(rows, 2, 3), accept[:, None])
    after = by_inversion(verdict.next_probabilities, resample)
    said = torch.where(verdict.num_accepted[:, None] == 1, tokens, after)
    law = torch.bincount(said[:, 0], minlength=3) / rows
    assert ((law - p).abs().max() < 0.02) == (not shared)
