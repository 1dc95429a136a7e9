"""Trees walked by what the target says: any tree is exact, and a wrong next token is refused."""

from itertools import product

import pytest
import torch

from layerskip.exact.acceptance import walk_chosen, walk_sampled
from tests.enumeration import continued, law_of, models, prefixes, random_trees


def naive_chosen(tokens, parents, valid, chosen, node=0):
    """One row, as nested calls: the path."""
    for i, token in enumerate(tokens):
        if valid[i] and parents[i] == node and token == chosen[node]:
            return [i + 1, *naive_chosen(tokens, parents, valid, chosen, i + 1)]
    return []


@pytest.mark.parametrize("n", [1, 3, 8])
def test_chosen_walks_random_trees(n):
    tokens, parents, valid, *_ = random_trees(500, n, 2, n)
    chosen = torch.randint(2, (500, n + 1))
    walk = walk_chosen(tokens, parents, valid, chosen)
    for b in range(500):
        path = naive_chosen(tokens[b].tolist(), parents[b].tolist(), valid[b].tolist(), chosen[b].tolist())
        assert walk.num_accepted[b] == len(path)
        assert walk.path[b].tolist() == path + [0] * (walk.path.shape[1] - len(path))
        assert walk.last[b] == (path[-1] if path else 0)
    assert walk.path.shape[1] == walk.num_accepted.max()


def chosen_law(parents, tokens, valid, target, following=lambda walk: walk.last) -> torch.Tensor:
    """Exact law for one tree: every value of chosen with its probability under the target."""
    spelled = prefixes(parents, tokens)
    vocab = len(target[0])
    chosen = torch.tensor(list(product(range(vocab), repeat=len(spelled))))  # (R, N+1)
    chances = torch.stack([target[len(s)][s][chosen[:, node]] for node, s in enumerate(spelled)], 1)  # (R, N+1)
    expand = lambda row: torch.tensor(row).expand(len(chosen), len(row))  # noqa: E731
    walk = walk_chosen(expand(tokens), expand(parents), expand(valid), chosen)
    after = chosen.gather(1, following(walk)[:, None])[:, 0]
    law = torch.zeros((vocab,) * len(target), dtype=torch.float64)
    for i in range(len(chosen)):
        said = tuple(tokens[node - 1] for node in walk.path[i, : walk.num_accepted[i]].tolist())
        one_hot = torch.nn.functional.one_hot(after[i], vocab).double()
        law[said] += chances[i].prod() * continued(one_hot, said, target)
    return law


def test_no_candidates():
    none, never = torch.empty(2, 0, dtype=torch.long), torch.empty(2, 0, dtype=torch.bool)
    walk = walk_chosen(none, none, never, torch.tensor([[3], [4]]))
    assert (walk.num_accepted.tolist(), walk.path.shape, walk.last.tolist()) == ([0, 0], (2, 0), [0, 0])


CHOSEN_TREES = [
    ([0, 0, 1, 2], [2, 0, 1, 1], [True] * 4),
    ([0, 0, 1, 1, 2], [1, 2, 0, 1, 2], [True] * 5),
    ([0, 0, 1, 2], [2, 1, 1, 1], [True, False, True, True]),
    ([0, 0, 1, 2], [2, 2, 1, 0], [True] * 4),  # equal siblings: the first is followed
    ([0, 1, 2], [0, 0, 2], [True, True, False]),
]


@pytest.mark.parametrize(("parents", "tokens", "valid"), CHOSEN_TREES)
@pytest.mark.parametrize("kind", ["full", "zeros", "top2"])
def test_any_fixed_tree_walked_by_draws_of_p_has_the_targets_law(parents, tokens, valid, kind):
    target, _ = models(parents, 3, 6, (kind, "full"))
    torch.testing.assert_close(chosen_law(parents, tokens, valid, target), law_of(target), atol=1e-9, rtol=0)


def test_enumeration_refuses_the_next_token_of_another_node():
    """Planted: the token after k accepted ones is read at node k, which is right for chains only."""
    target, _ = models([0, 0, 1, 2], 3, 6)
    law = chosen_law(*CHOSEN_TREES[0], target, following=lambda walk: walk.num_accepted)
    assert (law - law_of(target)).abs().max() > 0.01


def test_deterministic_children_are_recursive_rejection_with_point_masses():
    """walk_chosen and walk_sampled accept a lone child equally often: p(x)."""
    p = torch.tensor([0.2, 0.5, 0.3]).expand(1000, 2, 3)
    tokens, parents, valid = torch.ones(1000, 1).long(), torch.zeros(1000, 1).long(), torch.ones(1000, 1).bool()
    q = torch.nn.functional.one_hot(tokens, 3).float()
    walk, following = walk_sampled(tokens, parents, valid, q, p, (torch.arange(1000)[:, None] + 0.5) / 1000)
    assert walk.num_accepted.sum() == 500
    torch.testing.assert_close(following[-1], torch.tensor([0.4, 0.0, 0.6]))
