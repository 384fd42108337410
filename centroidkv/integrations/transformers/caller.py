"""Finding the attention module that called ``cache.update``.

A cache is handed to ``generate`` without being told the model, yet it has to know three things before the first token:
whether the model's attention would ignore the degrees, how keys are rotated, and which tokens are padding. The calling
attention module knows all three. It is looked up once per forward pass through the interpreter's frames, which touches
nothing and works with any model; ``enable(model)`` or ``CentroidCache(config=model.config)`` make it unnecessary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import CacheError

MAX_DEPTH = 16
"""Frames between ``update`` and the attention module's forward: two in plain models, a few more under wrappers."""


@dataclass(frozen=True)
class Caller:
    """The attention module in whose forward ``update`` was called, and the mask it is about to apply."""

    module: Any
    attention_mask: Any


def find_caller() -> Caller | None:
    """The nearest attention module on the call stack: a module with ``layer_idx`` and ``config``. None if hidden."""
    frame = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.nn.Module) and hasattr(candidate, "layer_idx") and hasattr(candidate, "config"):
            return Caller(candidate, frame.f_locals.get("attention_mask"))
        frame = frame.f_back  # type: ignore[assignment]
    return None


def real_tokens(attention_mask: Any, batch: int, new: int) -> Tensor | None:
    """Which of the ``new`` last columns are real tokens, ``[B, new]`` bool, or None if all are.

    ``attention_mask`` is what the attention function is about to apply: nothing, a 4-D mask, bool or additive, or
    flex attention's BlockMask. A column is padding if not even the last query sees it.

    Raises:
        CacheError: a mask of a kind that cannot be read.
    """
    if attention_mask is None:
        return None
    if isinstance(attention_mask, Tensor):
        visible = attention_mask[:, 0, -1, :] if attention_mask.ndim == 4 else attention_mask
        visible = visible if visible.dtype == torch.bool else visible == 0
    elif hasattr(attention_mask, "mask_mod"):
        queries, columns = attention_mask.seq_lengths
        device = attention_mask.kv_num_blocks.device
        row = torch.arange(batch, device=device)[:, None]
        column = torch.arange(columns, device=device)[None]
        zero = torch.zeros((), dtype=torch.long, device=device)
        visible = attention_mask.mask_mod(row, zero, zero + queries - 1, column).expand(batch, columns)
    else:
        raise CacheError(f"cannot read padding from a mask of type {type(attention_mask).__name__}")
    real = visible[:, -new:].expand(batch, new)
    return None if bool(real.all()) else real
