"""What this machine computes fast, and by which clock that is told."""

from __future__ import annotations

import platform
from functools import cache
from time import perf_counter, thread_time

import torch

COARSE = 1e-4  # seconds: a clock that moves by more says nothing of a pass of a small model


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where `device` has instructions for it, else float32.

    Without them a CPU emulates bfloat16: measured on a Zen 3 (AVX2 only), a product of 64 rows takes five times as
    long as in float32. With them (avx512_bf16, AMX) it is the faster one, above all for the few rows that
    verification reads, where float32 costs nearly as much per row as for one.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type == "cpu" and not _cpu_has_bfloat16():
        return torch.float32
    return torch.bfloat16


def _cpu_has_bfloat16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(ask() for ask in asked if ask is not None)
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN, as on macOS
        return False


def thread_clock_serves(device: torch.device) -> bool:
    """Whether passes on `device` are best timed by the calling thread's processor time, `time.thread_time`: on a CPU,
    where that clock is fine enough.

    The thread works or spins while torch's others do, and its time does not count while the machine runs something
    else. By the wall clock a busy machine makes long passes slow and leaves short ones alone.
    """
    return device.type == "cpu" and _thread_clock_is_fine()


@cache
def _thread_clock_is_fine() -> bool:
    """Asked of the clock itself: on Windows it moves every 15.6 ms, and `time.get_clock_info` says 100 ns."""
    return min(_tick() for _ in range(3)) <= COARSE


def _tick() -> float:
    """Seconds that the thread's clock moves by at once; infinite where it stands still for ten times `COARSE`."""
    start, first = perf_counter(), thread_time()
    while perf_counter() - start < 10 * COARSE:
        if (now := thread_time()) != first:
            return now - first
    return float("inf")
