"""What weighs the drafts of a call (`adaptive.py`), kept for the next call with the same model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from layerskip.checkpoint.settings import AUTO, Setting
from layerskip.draft.adaptive import Adaptive
from layerskip.draft.exits import KnownExit, known_exit, known_exits
from layerskip.draft.prospect import Prospect
from layerskip.draft.round_times import Part, RoundTimes
from layerskip.forecast import paper_costs
from layerskip.model.anatomy import device_of
from layerskip.model.machine import thread_clock_serves

if TYPE_CHECKING:
    from layerskip.model.stages import Stages

_remembered: weakref.WeakKeyDictionary[nn.Module, dict[Any, Adaptive]] = weakref.WeakKeyDictionary()


@contextmanager
def adaptive_for(stages: Stages, setting: Setting, sampled: bool) -> Iterator[Adaptive]:
    """What weighs the drafts of a call. It begins with what the last one of its kind with this model had learnt."""
    model = stages.model
    exits = known_exits(model) if setting.exit_layer == AUTO else [known_exit(model, setting.exit_layer)]
    most = len(setting.shape.widths)
    kind = (tuple(exits), most, sampled, setting.draft_vocabulary, model.dtype, device_of(model))
    calls = _remembered.setdefault(model, {})
    adaptive = calls[kind].again() if kind in calls else _new(stages, exits, most, sampled)
    try:
        yield adaptive
    finally:
        calls[kind] = adaptive


def _new(stages: Stages, exits: Sequence[KnownExit], most: int, sampled: bool) -> Adaptive:
    costs = paper_costs(stages.model, [known.exit_layer for known in exits], stages.draft_vocabulary)
    draft = costs.cut_draft or costs.draft
    weights: dict[Part, float] = {("plain",): costs.plain}
    prospects = []
    for known in exits:
        e = known.exit_layer
        weights |= {("draft", e): draft[e], ("verify", e): costs.verify[e][1]}
        acceptance = known.overlap if sampled else known.agreement
        prospects.append(Prospect(known, acceptance, costs.extend[e] / draft[e], most))
    return Adaptive(most, prospects, RoundTimes(weights), processor=thread_clock_serves(device_of(stages.model)))


def forget(model: nn.Module) -> None:
    """What earlier calls with this model have learnt."""
    _remembered.pop(model, None)
