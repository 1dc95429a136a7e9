"""The dtype that is fast here: by what the CPU says of itself, and what follows from it."""

import platform

import pytest
import torch

from infer.loading import load
from infer.options import ModelOptions
from layerskip.model.machine import fast_dtype
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
