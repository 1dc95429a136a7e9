"""When chains end: by what was seen before a token is drawn, and by what it is worth."""

import pytest
import torch

from layerskip.checkpoint.settings import Setting
from layerskip.decode.step import Step
from layerskip.draft.draft_stop import DraftStop, Heuristic, confidence, draft_stop_for


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


def test_settings_name_the_stop():
    assert isinstance(draft_stop_for("heuristic", 4), Heuristic)
    assert draft_stop_for(None, 4).begin() == 4
    with pytest.raises(ValueError, match="a probability, or heuristic or cost"):
        Setting(2, 4, draft_stop="never")
    with pytest.raises(ValueError, match="0 to 1"):
        Setting(2, 4, draft_stop=1.5)
    with pytest.raises(ValueError, match="leave one of the two out"):
        Setting(2, 4, tree=(2, 1), draft_stop=0.5)
