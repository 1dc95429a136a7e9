"""What speculation will bring: acceptance of every exit from one teacher-forced pass, times costs on this machine.

One pass over text tells how every exit, every draft length and every tree would do (`agreement.py`); a handful of timed
calls tells what they cost (`costs.py`, `bookkeeping.py`); `best.py` multiplies the two. No grid of decoding runs. On
paper, from an acceptance and a few costs alone, `cycle` answers.

Names are loaded when first used: the loop that is timed here takes some of them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerskip.lazy import lazily

_HOMES = {
    "Cycle": "paper",
    "cycle": "paper",
    "ExitMeasurement": "agreement",
    "measure_exits": "agreement",
    "Bookkeeping": "cost_model",
    "Costs": "cost_model",
    "TreeCosts": "cost_model",
    "paper_costs": "cost_model",
    "tree_name": "cost_model",
    "measure_bookkeeping": "bookkeeping",
    "measure_costs": "costs",
    "Forecast": "best",
    "best_setting": "best",
}
__all__ = [
    "Bookkeeping",
    "Costs",
    "Cycle",
    "ExitMeasurement",
    "Forecast",
    "TreeCosts",
    "best_setting",
    "cycle",
    "measure_bookkeeping",
    "measure_costs",
    "measure_exits",
    "paper_costs",
    "tree_name",
]

if TYPE_CHECKING:
    from layerskip.forecast.agreement import ExitMeasurement, measure_exits
    from layerskip.forecast.best import Forecast, best_setting
    from layerskip.forecast.bookkeeping import measure_bookkeeping
    from layerskip.forecast.cost_model import Bookkeeping, Costs, TreeCosts, paper_costs, tree_name
    from layerskip.forecast.costs import measure_costs
    from layerskip.forecast.paper import Cycle, cycle


__getattr__ = lazily(__name__, _HOMES)
