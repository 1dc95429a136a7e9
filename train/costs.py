"""How long this machine takes over the stages of the model, measured once a run, so that forecasts can be compared."""

import copy
import dataclasses
import platform
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from layerskip.checkpoint.whole_files import read_json, write_json
from layerskip.forecast import Bookkeeping, Costs, measure_bookkeeping, measure_costs
from layerskip.model.anatomy import UnsupportedModelError
from layerskip.model.draft_head import with_draft_head
from layerskip.model.machine import fast_dtype
from train.config import TrainConfig
from train.disk import writing_alone

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
    size = config.data.draft_vocabulary
    conditions = {**machine(accelerator, config), "exits": list(exits), "draft_vocabulary": size}
    stored = read_json(path)
    if stored.get("conditions") == conditions:
        return _from_json(stored["seconds"])
    timed = copy.deepcopy(model).to(device=accelerator.device, dtype=getattr(torch, conditions["dtype"])).eval()
    context = min(_CONTEXT, config.data.sequence_length // 2)
    costs = measure_costs(timed, exits, context=context, draft_vocabulary=_any_vocabulary(timed, size))
    costs = dataclasses.replace(costs, bookkeeping=measure_bookkeeping(timed, do_sample=False))
    with writing_alone(path):
        write_json(path, {"conditions": conditions, "seconds": dataclasses.asdict(costs)})
    return costs


def _any_vocabulary(model: "PreTrainedModel", size: int | None) -> torch.Tensor | None:
    """As many tokens as the draft vocabulary will have: which ones, known in the end, does not matter to time. None
    where there will be none, or the model's head cannot be cut."""
    if size is None:
        return None
    token_ids = torch.arange(min(size, model.get_input_embeddings().num_embeddings), device=model.device)
    try:
        with_draft_head(model, model, token_ids)
    except UnsupportedModelError:
        return None
    return token_ids


def machine(accelerator: Accelerator, config: TrainConfig) -> dict[str, Any]:
    """The conditions that a forecast holds under: those that the finished checkpoint is decoded in, if not asked for
    others."""
    device, dtype = accelerator.device, config.model.save_dtype
    if device.type == "cpu" and fast_dtype(device) == torch.float32:
        dtype = "float32"  # as `python -m infer` does: half precision would be emulated
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
    return {"device": name, "threads": torch.get_num_threads(), "dtype": dtype, "batch_size": 1}


def _from_json(seconds: dict[str, Any]) -> Costs:
    """JSON has only strings for keys."""
    verify = {int(e): {int(n): s for n, s in table.items()} for e, table in seconds["verify"].items()}
    draft, extend, cut_draft = (
        {int(e): s for e, s in seconds[name].items()} for name in ("draft", "extend", "cut_draft")
    )
    bookkeeping = Bookkeeping(**seconds["bookkeeping"])
    return Costs(seconds["plain"], draft, extend, verify, cut_draft, bookkeeping)
