"""Tensors that find kernels out: views inside NaN, rows gigabytes apart, output buffers that are never blank."""

from __future__ import annotations

import mmap

import pytest
import torch

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inside_nan(x):
    """The same numbers ``[B, H, T, ...]`` in [B, T, H, ...] memory, with NaN (integers: -9) before and behind each."""
    batch, heads, slots, *rest = x.shape
    poison = float("nan") if x.is_floating_point() else -9
    around = torch.full((batch, slots + 3, heads + 1, *(size + 2 for size in rest)), poison, dtype=x.dtype)
    view = around[:, 2 : slots + 2, :heads].transpose(1, 2)
    view = view[..., 1:-1] if rest else view
    return view.copy_(x)


def far_apart(x):
    """The same numbers ``[1, 1, T, D]``, bfloat16, so far apart that places do not fit 32 bits."""
    step = 2**31 // max(x.shape[2] - 1, 1) + 1
    memory = mmap.mmap(-1, 2 * (step * (x.shape[2] - 1) + x.shape[3]))  # only pages that are touched take memory
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    return flat.as_strided(x.shape, (0, 0, step, 1)).copy_(x)


@pytest.fixture
def _blank_is_nan(monkeypatch):
    """Fill what ``torch.empty`` returns, so that whatever a kernel does not write shows."""
    empty = torch.empty

    def filled(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", filled)
