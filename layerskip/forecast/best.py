"""The best setting: what a round would commit, by what it takes, for every exit, draft length, tree and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerskip.forecast.agreement import ExitMeasurement
from layerskip.forecast.cost_model import Costs, DraftShape
from layerskip.model.tree import parse_shape


@dataclass(frozen=True)
class Forecast:
    """A setting and what it should bring.

    Attributes:
        num_draft_tokens: of a chain; of a tree its depth, the most that can be accepted.
        speedup: over plain decoding in the same loop; 1 is no gain.
        draft_vocabulary: whether the exit's head is cut to the draft vocabulary, where there is one.
        tree: its shape, as in `Setting`; None: a chain.
        interval: of the speed-up, where it would lie in 9 of 10 cases with other texts of the kind: what the machine
            does besides is not in it. None where there were fewer than two texts.
    """

    exit_layer: int
    num_draft_tokens: int
    mean_acceptance_length: float
    speedup: float
    draft_vocabulary: bool = True
    tree: str | tuple[int, ...] | None = None
    interval: tuple[float, float] | None = None


def best_setting(
    measured: dict[int, ExitMeasurement],
    costs: Costs,
    max_draft_tokens: int = 8,
    sampled: bool = False,
    trees: Sequence[str | tuple[int, ...]] = (),
) -> list[Forecast]:
    """Every (exit layer, draft) that both have seen, best first; for greedy decoding, or for sampling as the exits were
    measured. Where exits were measured and timed with a draft vocabulary too, with and without it.

    The model: speedup = mean acceptance length x plain step / round. The acceptance length is that of the texts,
    walked as decoding would (`ExitMeasurement.acceptance`); a round is the sum of its passes and of what the loop adds
    (`Costs.round`), whatever is accepted. Taken for granted: the texts are like those to come; outputs are long, so
    that prompts and last rounds do not count; time does not depend on how many tokens are in the cache; batch 1.

    Args:
        trees: shapes beside the chains of 1 .. max_draft_tokens, where the costs know trees.
    """
    drafts: list[DraftShape] = [*range(1, max_draft_tokens + 1), *trees]
    forecasts = []
    for exit_layer in costs.draft:
        whole, cut = measured[exit_layer], measured[exit_layer].cut if exit_layer in costs.cut_draft else None
        for measurement in (whole,) if cut is None else (whole, cut):
            for draft in drafts if exit_layer in costs.trees else drafts[:max_draft_tokens]:
                in_use = cut is None or measurement is cut  # as in `Setting`: where there is one
                forecast = _forecast(measurement, costs, exit_layer, draft, sampled, measurement is cut, in_use)
                if forecast.speedup == forecast.speedup:  # not nan: text too short
                    forecasts.append(forecast)
    return sorted(forecasts, key=lambda forecast: -forecast.speedup)


def _forecast(
    measurement: ExitMeasurement,
    costs: Costs,
    exit_layer: int,
    draft: DraftShape,
    sampled: bool,
    cut: bool,
    draft_vocabulary: bool,
) -> Forecast:
    found = measurement.acceptance(draft, sampled)
    gain = costs.step / costs.round(exit_layer, draft, cut)  # of each accepted token
    interval = found.interval()
    return Forecast(
        exit_layer,
        draft if isinstance(draft, int) else len(parse_shape(draft).widths),
        found.length,
        gain * found.length,
        draft_vocabulary,
        None if isinstance(draft, int) else draft,
        None if interval is None else (gain * interval[0], gain * interval[1]),
    )
