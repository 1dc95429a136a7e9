"""The learning rate at the points that matter, and what weight decay is applied to."""

import pytest
import torch
from torch import nn

from train.config import OptimConfig
from train.optim import build_optimizer, learning_rate, set_learning_rate

SCHEDULES = ("cosine", "linear", "constant")


def rates(**settings) -> list[float]:
    optim = OptimConfig(**{"max_steps": 101, "warmup_steps": 10, "learning_rate": 2.0, **settings})
    return [learning_rate(step, optim) for step in range(optim.max_steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_linearly_to_the_peak(schedule):
    course = rates(schedule=schedule)
    assert course[:11] == pytest.approx([2.0 * (step + 1) / 11 for step in range(11)])
    assert max(course) == course[10] == 2.0
    assert course[0] > 0


@pytest.mark.parametrize(("schedule", "end"), [("cosine", 0.2), ("linear", 0.2), ("constant", 2.0)])
def test_last_step_has_the_least_rate(schedule, end):
    course = rates(schedule=schedule)
    assert course[-1] == pytest.approx(end)
    assert min(course[10:]) == course[-1]
    assert sorted(course[10:], reverse=True) == course[10:]


def test_cosine_and_linear_are_half_way_down_in_the_middle():
    assert rates(schedule="cosine")[55] == pytest.approx(1.1)
    assert rates(schedule="linear")[55] == pytest.approx(1.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_warm_up_and_a_single_step(schedule):
    assert rates(schedule=schedule, warmup_steps=0, max_steps=1) == [2.0]


def test_rate_may_fall_to_zero():
    assert rates(min_learning_rate=0.0)[-1] == pytest.approx(0.0)


def test_weight_decay_is_for_matrices_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    decayed, plain = build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)


def test_frozen_parameters_are_left_out():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_zero3_parameters_are_judged_by_their_whole_shape():
    model = nn.Linear(4, 4)
    model.weight.data = torch.empty(0)  # what ZeRO-3 leaves behind
    model.weight.ds_shape, model.bias.ds_shape = (4, 4), (4,)  # type: ignore[attr-defined]
    decayed, plain = build_optimizer(model, OptimConfig()).param_groups
    assert decayed["params"][0] is model.weight
    assert plain["params"][0] is model.bias


def test_set_learning_rate_sets_all_groups():
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig())
    set_learning_rate(optimizer.param_groups, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
