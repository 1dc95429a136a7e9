"""What is fast here, by what the CPU says of itself, and the clock that tells it, by how it moves."""

import platform
from time import perf_counter

import pytest
import torch

from infer.loading import load
from infer.options import ModelOptions
from layerskip.forecast.stopwatch import Stopwatch
from layerskip.model import machine
from layerskip.model.machine import fast_dtype, thread_clock_serves
from tests import tiny


def pretend(monkeypatch, avx512_bf16: bool, amx: bool) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)


@pytest.mark.parametrize(("avx512_bf16", "amx"), [(False, False), (True, False), (False, True)])
def test_bfloat16_only_where_the_cpu_has_it(monkeypatch, avx512_bf16, amx):
    pretend(monkeypatch, avx512_bf16, amx)
    assert fast_dtype("cpu") == (torch.bfloat16 if avx512_bf16 or amx else torch.float32)


def test_other_cpus_are_asked_through_onednn(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert fast_dtype("cpu") in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("has", "asked", "expected"), [
    (False, "auto", torch.float32),
    (True, "auto", torch.bfloat16),
    (False, "bfloat16", torch.bfloat16),
])  # fmt: skip
def test_a_half_precision_checkpoint_is_read_in_what_is_fast_here(monkeypatch, tmp_path, has, asked, expected):
    tiny.llama(vocab_size=300).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    pretend(monkeypatch, has, False)
    assert load(ModelOptions(str(tmp_path), dtype=asked)).model.dtype == expected


@pytest.mark.parametrize(("tick", "fine"), [(1e-7, True), (1 / 64, False), (0.0, False)])
def test_a_coarse_thread_clock_times_nothing(monkeypatch, tick, fine):
    """On Windows it moves 64 times a second, whatever it says of itself; in some sandboxes not at all."""
    looks = iter(range(10**9))
    monkeypatch.setattr(machine, "thread_time", lambda: next(looks) // 40 * tick)
    monkeypatch.setattr(machine, "_thread_clock_is_fine", machine._thread_clock_is_fine.__wrapped__)  # asked anew
    cpu = torch.device("cpu")
    assert thread_clock_serves(cpu) == fine
    assert not thread_clock_serves(torch.device("cuda"))
    assert (Stopwatch(cpu).clock is perf_counter) == (not fine)
