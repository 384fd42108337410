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


def real_tokens(attention_mask: Any, new: int) -> Tensor | None:
    """Which of the ``new`` last columns are real tokens, ``[B, new]`` bool, or None if all are (or no mask tells).

    ``attention_mask`` is the 2-D padding mask, or the 4-D mask of one layer, bool or additive: there a column is
    padding if not even the last query sees it.
    """
    if not isinstance(attention_mask, Tensor):
        return None
    if attention_mask.ndim == 4:
        visible = attention_mask[:, 0, -1, :]
        visible = visible if visible.dtype == torch.bool else visible == 0
    else:
        visible = attention_mask != 0
    real = visible[:, -new:]
    return None if bool(real.all()) else real
