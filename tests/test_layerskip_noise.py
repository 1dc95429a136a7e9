"""Noise keyed by position: what it is a function of, what it is distributed as, and the coupled rule made of it."""

import hashlib
import math

import pytest
import torch

from layerskip.exact.acceptance import walk_chosen
from layerskip.exact.noise import Noise, choose, gumbel
from tests.distributions import chi_square_p_value
from tests.enumeration import random_tables


def by_hand(seed: int, position: int, vocab: int) -> list[float]:
    """The same numbers in Python's own integers and logarithms."""
    word = 2**64 - 1
    base = int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest(), "little")
    noise = []
    for x in range(vocab):
        z = (base + x * 0x9E3779B97F4A7C15) & word
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        z ^= z >> 31
        noise.append(-math.log(-math.log1p(-((z >> 24) + 0.5) / 2**40)))
    return noise


def test_the_numbers_stay_the_same():
    """Another process, machine or version of torch must find them again."""
    known = torch.tensor([[[0.3050, 0.8172, -0.5420]], [[1.5716, -1.3257, -0.3377]]])
    torch.testing.assert_close(gumbel([7, -(2**70)], [[0], [4096]], 3), known, atol=1e-4, rtol=0)
    for seed, position in ((7, 0), (-(2**70), 4096), (2**64 - 1, 1)):
        torch.testing.assert_close(
            gumbel([seed], [[position]], 5000)[0, 0], torch.tensor(by_hand(seed, position, 5000)), atol=1e-5, rtol=1e-5
        )


def test_a_function_of_seed_and_position_alone():
    together = gumbel([5, 6], torch.tensor([[3, 9], [9, 3]]), 50)
    assert together.shape == (2, 2, 50)
    assert together.dtype == torch.float32
    torch.manual_seed(0)
    torch.rand(3)
    for row, seed in enumerate([5, 6]):
        for column, position in enumerate([[3, 9], [9, 3]][row]):
            assert torch.equal(gumbel([seed], [[position]], 50)[0, 0], together[row, column])
            assert torch.equal(gumbel([seed], [[position]], 80)[0, 0, :50], together[row, column])
    assert gumbel([5, 6], [[], []], 50).shape == (2, 0, 50)


def test_every_bit_of_the_key_counts():
    keys = [(seed, position) for seed in (0, 1, -1, 2**32, 2**63, 2**64) for position in (0, 1, 10, 2**32, 2**40)]
    drawn = torch.cat([gumbel([seed], [[position]], 3000)[0] for seed, position in keys])
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.12  # 435 pairs, each 0 +- 0.018


def test_it_is_gumbel_noise():
    noise = gumbel([1], [list(range(40))], 10_000).double().flatten()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=4 * 1.2826 / math.sqrt(len(noise)))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    bins = (torch.exp(-torch.exp(-noise)) * 20).long().clamp(max=19)  # uniform by its own distribution function
    assert chi_square_p_value(bins.tolist(), dict.fromkeys(range(20), 0.05)) > 1e-3


def test_chosen_tokens_are_samples():
    """Along the vocabulary and along the positions, singly and in pairs."""
    p = torch.tensor([0.45, 0.3, 0.1, 0.1, 0.05, 0.0])
    expected = dict(enumerate(p.tolist()))
    along = choose(p.log(), gumbel([3], [list(range(50))], 6000).view(50_000, 6))
    assert chi_square_p_value(along.tolist(), expected) > 1e-3
    positions = choose(p.log(), gumbel([4], [list(range(6000))], 6)[0]).tolist()
    assert chi_square_p_value(positions, expected) > 1e-3
    pairs = {(a, b): expected[a] * expected[b] for a in expected for b in expected}
    assert chi_square_p_value(list(zip(positions[::2], positions[1::2], strict=True)), pairs) > 1e-3
    rows = choose(p.log(), gumbel(range(6000), [[8]] * 6000, 6)[:, 0]).tolist()
    assert chi_square_p_value(rows, expected) > 1e-3
    assert chi_square_p_value(positions, dict(enumerate([0.4, 0.3, 0.15, 0.1, 0.05, 0.0]))) < 1e-6


def test_scores_of_any_size_choose_alike():
    noise = gumbel([1], [list(range(500))], 30)[0]
    scores = torch.randn(500, 30, generator=torch.Generator().manual_seed(0))
    chosen = choose(scores, noise)
    assert torch.equal(chosen, (scores.double() + noise).argmax(-1))
    assert torch.equal(chosen, choose(scores.log_softmax(-1), noise))
    far = (scores * 64).round() / 64  # float32 holds far + 4096 exactly
    assert torch.equal(choose(far, noise), choose(far + 4096, noise))


def test_noise_is_drawn_once_and_forgotten():
    noise = Noise([5, 6], 40)
    first = noise.at(1, 7)
    assert torch.equal(first, gumbel([6], [[7]], 40)[0, 0])
    assert noise.at(1, 7) is first
    earlier, later = noise.at(1, 6), noise.at(1, 8)
    other = noise.at(0, 6)
    noise.forget_before(1, 7)
    assert noise.at(1, 7) is first
    assert noise.at(1, 8) is later
    assert noise.at(0, 6) is other
    assert noise.at(1, 6) is not earlier
    assert torch.equal(noise.at(1, 6), earlier)


# -- the coupled rule -------------------------------------------------------------------------------------------------

LENGTH, V = 4, 4
TARGET, DRAFT = (
    [table.float().log() for table in random_tables(seed, V, LENGTH + 3, kind)]
    for seed, kind in ((1, "full"), (2, "zeros"))
)


def plain(noise: Noise) -> tuple[int, ...]:
    said: tuple[int, ...] = ()
    while len(said) < LENGTH:
        said += (choose(TARGET[len(said)][said], noise.at(0, len(said))).item(),)
    return said


def chain(prefix, draft, noise):
    """Two tokens that the draft chooses with the noise of the positions they are drafted for."""
    tokens = ()
    for _ in range(2):
        spelled = prefix + tokens
        tokens += (choose(draft[len(spelled)][spelled], noise.at(0, len(spelled))).item(),)
    return [0, 1], tokens


def tree(prefix, draft, noise):
    """The two best below the root under the noise, each with its best child."""
    roots = (draft[len(prefix)][prefix] + noise.at(0, len(prefix))).topk(2).indices.tolist()
    below = [choose(draft[len(prefix) + 1][(*prefix, x)], noise.at(0, len(prefix) + 1)).item() for x in roots]
    return [0, 0, 1, 2], (*roots, *below)


def coupled(noise: Noise, propose, draft, key=lambda said, depth: len(said) + depth) -> tuple[tuple[int, ...], int]:
    """Rounds of drafting and walking, until LENGTH tokens: what was said, and how many drafts were accepted."""
    said, accepted = (), 0
    while len(said) < LENGTH:
        parents, tokens = propose(said, draft, noise)
        paths = [said]
        for parent, token in zip(parents, tokens, strict=True):
            paths.append((*paths[parent], token))
        chosen = [choose(TARGET[len(s)][s], noise.at(0, key(said, len(s) - len(said)))).item() for s in paths]
        as_row = lambda x: torch.tensor([x])  # noqa: E731
        walk = walk_chosen(as_row(tokens), as_row(parents), torch.ones(1, len(tokens)).bool(), as_row(chosen))
        said = (*paths[walk.last.item()], chosen[walk.last.item()])
        accepted += int(walk.num_accepted)
    return said[:LENGTH], accepted


@pytest.mark.parametrize("propose", [chain, tree])
def test_speculation_says_what_plain_sampling_says(propose):
    accepted = 0
    for seed in range(150):
        said, kept = coupled(Noise([seed], V), propose, DRAFT)
        assert said == plain(Noise([seed], V))
        accepted += kept
    assert accepted > 75


def test_a_draft_equal_to_the_target_is_always_accepted():
    for seed in range(20):
        _, accepted = coupled(Noise([seed], V), chain, TARGET)
        assert accepted == 4  # two rounds of two


def test_the_comparison_refuses_noise_keyed_by_the_place_in_the_round():
    wrong = [
        coupled(Noise([seed], V), chain, DRAFT, key=lambda said, depth: depth)[0] == plain(Noise([seed], V))
        for seed in range(30)
    ]
    assert not all(wrong)
