"""When chains end: by what was seen before a token is drawn, and by what it is worth."""

import pytest
import torch

from layerskip.decoding import Step
from layerskip.draft_stop import CostAware, DraftStop, Heuristic, confidence, draft_stop_for
from layerskip.settings import Setting


def scores(*probabilities):
    """(B, 1, 50): the first token with that probability, the others share the rest."""
    rows = torch.tensor(probabilities)[:, None].expand(-1, 50).clone()
    rows[:, 1:] = (1 - rows[:, 1:]) / 49
    return rows.log()[:, None]


def step(drafted, accepted, draft=0.0, verify=0.0):
    return Step(torch.zeros(1, accepted + 1), drafted, accepted, draft, verify, 0.0)


def test_confidence_is_the_highest_probability():
    torch.testing.assert_close(confidence(scores(0.3, 0.9)), torch.tensor([0.3, 0.9]))


def test_a_threshold_is_asked_row_by_row():
    stop = DraftStop(4, 0.5)
    assert stop.begin() == 4
    assert stop.goes_on(scores(0.4, 0.6)).tolist() == [False, True]
    assert not DraftStop(4).asks


def test_the_heuristic_follows_the_last_round():
    stop, lengths = Heuristic(8, start=4), []
    for accepted in (4, 6, 8, 3, 0, 0):
        lengths.append(stop.begin())
        stop.end([step(lengths[-1], min(accepted, lengths[-1]))])
    assert lengths == [4, 6, 8, 8, 7, 6]
    for _ in range(9):
        stop.end([step(stop.begin(), 0)])
    assert stop.begin() == 1
    stop.end([step(1, 1), step(1, 0)])  # one row did not accept all
    assert stop.begin() == 1


def chain_length(stop, probability):
    n, most = 0, stop.begin()
    while n < most and bool(stop.goes_on(scores(probability)).all()):
        n += 1
    return n


@pytest.mark.parametrize(("draft", "shortest", "longest"), [(0.001, 6, 8), (0.02, 1, 4), (0.2, 0, 0)])
def test_cost_drafts_longer_where_drafts_are_cheap(draft, shortest, longest):
    """Verification takes 0.1 s, and four of five drafted tokens are accepted at a confidence of 0.85."""
    stop = CostAware(8)
    for i in range(60):
        n = chain_length(stop, 0.85)
        accepted = min(n, (0, 1, 2, 4, 8, 3, 5, 2, 8, 1)[i % 10])
        stop.end([step(n, accepted, draft=draft * (n + 1) if stop._round else 0.0, verify=0.1)])
    assert shortest <= chain_length(stop, 0.85) <= longest


def test_cost_stops_drafting_where_it_does_not_pay_and_looks_again():
    stop, drafted = CostAware(4), []
    for _ in range(100):
        n = chain_length(stop, 0.99)
        drafted.append(n)
        stop.end([step(n, 0, draft=0.1 * (n + 1) if stop._round else 0.0, verify=0.1)])
    assert not any(drafted[8:31])
    assert sum(map(bool, drafted[31:])) <= 3


def test_cost_learns_what_a_confidence_is_worth():
    """An exit that is sure and wrong is soon drafted from no more; one that is right is drafted from again."""
    stop = CostAware(8)
    for _ in range(30):
        stop.end([step(chain_length(stop, 0.95), 0, draft=0.02, verify=0.1)])
    stop._count = stop.LOOK - 1
    wrong = chain_length(stop, 0.95)
    right = CostAware(8)
    for _ in range(30):
        n = chain_length(right, 0.95)
        right.end([step(n, n, draft=0.02 * (n + 1) / 4, verify=0.1)])
    assert wrong < chain_length(right, 0.95) == 8


def test_settings_name_the_stop():
    assert isinstance(draft_stop_for("cost", 4), CostAware)
    assert isinstance(draft_stop_for("heuristic", 4), Heuristic)
    assert draft_stop_for(None, 4).begin() == 4
    with pytest.raises(ValueError, match="a probability, or heuristic or cost"):
        Setting(2, 4, draft_stop="never")
    with pytest.raises(ValueError, match="0 to 1"):
        Setting(2, 4, draft_stop=1.5)
    with pytest.raises(ValueError, match="leave one of the two out"):
        Setting(2, 4, tree=(2, 1), draft_stop=0.5)
