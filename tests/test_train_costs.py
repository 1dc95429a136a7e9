"""Costs of a run: what the finished checkpoint is decoded in, stored once, and read back as they were."""

import json

import torch
from accelerate import Accelerator

from layerskip.model.machine import fast_dtype
from tests import tiny
from tests.runs import TINY
from train.command import load_config
from train.costs import machine, stage_costs


def test_costs_are_read_back_as_they_were_timed(tmp_path):
    """The loop's own time and the cut head among them."""
    settings = [f"run.output_dir={tmp_path}", "model.save_dtype=float32", "data.draft_vocabulary=16"]
    config, accelerator, model = load_config(TINY, settings), Accelerator(cpu=True), tiny.llama()
    timed = stage_costs(accelerator, model, config, (1, 2))
    assert set(timed.cut_draft) == {1, 2}
    assert timed.bookkeeping.plain > 0
    assert timed.round(1, 3) > timed.layers(1, 3) > 0
    assert stage_costs(accelerator, model, config, (1, 2)) == timed
    assert model.dtype == torch.float32
    stored = json.loads((tmp_path / "costs.json").read_text())
    assert stored["seconds"]["bookkeeping"]["plain"] == timed.bookkeeping.plain
    whole = load_config(TINY, settings[:2])
    assert stage_costs(accelerator, model, whole, (1, 2)).cut_draft == {}  # other conditions: timed anew


def test_costs_are_in_the_dtype_that_the_checkpoint_is_decoded_in(tmp_path):
    """Trained in bfloat16 and saved in float32, it is decoded in float32; half precision only where it is fast."""
    accelerator, folder = Accelerator(cpu=True), f"run.output_dir={tmp_path}"
    mixed = load_config(TINY, [folder, "model.dtype=bfloat16", "model.save_dtype=float32"])
    assert machine(accelerator, mixed)["dtype"] == "float32"
    half = load_config(TINY, [folder, "model.save_dtype=bfloat16"])
    usual = "bfloat16" if fast_dtype("cpu") == torch.bfloat16 else "float32"
    assert machine(accelerator, half)["dtype"] == usual
