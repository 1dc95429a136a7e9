"""What this machine computes fast."""

from __future__ import annotations

import platform

import torch


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
