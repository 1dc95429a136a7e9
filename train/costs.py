"""How long this machine takes over the stages of the model, measured once a run, so that forecasts can be compared."""

import copy
import dataclasses
import platform
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from layerskip.forecast import Costs, measure_costs
from train.config import TrainConfig
from train.files import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONTEXT = 128  # cached tokens when the stages are timed


def stage_costs(
    accelerator: Accelerator, model: "PreTrainedModel", config: TrainConfig, exits: tuple[int, ...]
) -> Costs:
    """The costs in costs.json of the run folder, measured now if there are none for this machine and these exits.

    Weights do not matter to time, so this is done once, before anything hangs on the model. A resumed run goes by
    the same costs: what else the machine does at the moment would move a forecast more than a thousand steps do.
    """
    path = config.run.folder / "costs.json"
    conditions = {**machine(accelerator, config), "exits": list(exits)}
    stored = read_json(path)
    if stored.get("conditions") == conditions:
        return _from_json(stored["seconds"])
    timed: torch.nn.Module = copy.deepcopy(model)
    timed.to(device=accelerator.device, dtype=getattr(torch, config.model.dtype))
    costs = measure_costs(timed, exits, context=min(_CONTEXT, config.data.sequence_length // 2))
    write_json(path, {"conditions": conditions, "seconds": dataclasses.asdict(costs)})
    return costs


def machine(accelerator: Accelerator, config: TrainConfig) -> dict[str, Any]:
    """The conditions that a forecast holds under."""
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
    return {"device": name, "threads": torch.get_num_threads(), "dtype": config.model.dtype, "batch_size": 1}


def _from_json(seconds: dict[str, Any]) -> Costs:
    """JSON has only strings for keys."""
    verify = {int(e): {int(n): s for n, s in table.items()} for e, table in seconds["verify"].items()}
    draft, extend = ({int(e): s for e, s in seconds[name].items()} for name in ("draft", "extend"))
    return Costs(seconds["plain"], draft, extend, verify)
