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

from centroidkv.errors import BackendError, CacheError

MAX_DEPTH = 16
"""Frames between ``update`` and the attention module's forward: two in plain models, a few more under wrappers."""


@dataclass(frozen=True)
class Caller:
    """The attention module in whose forward ``update`` was called, and the mask it is about to apply."""

    module: Any
    attention_mask: Any
    query_states: Any = None


def find_caller() -> Caller | None:
    """The nearest attention module on the call stack: a module with ``layer_idx`` and ``config``. None if hidden."""
    frame = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        local = frame.f_locals
        candidate = local.get("self")
        if isinstance(candidate, torch.nn.Module) and hasattr(candidate, "layer_idx") and hasattr(candidate, "config"):
            return Caller(candidate, local.get("attention_mask"), local.get("query_states"))
        frame = frame.f_back  # type: ignore[assignment]
    return None


def find_queries(layer_idx: int) -> Tensor:
    """The queries ``[B, Hq, L, D]`` that this layer is about to attend with: after RoPE, times its attention scale.

    All of transformers' rotary models name them ``query_states`` and rotate them before they call ``update``.

    Raises:
        BackendError: they cannot be seen, so a compressor that needs them cannot run.
    """
    caller = find_caller()
    if caller is None or not isinstance(caller.query_states, Tensor):
        seen = "no attention module" if caller is None else f"no query_states in {type(caller.module).__name__}.forward"
        raise BackendError(
            f"this compressor weighs slots by the model's queries, but the cache sees {seen} at layer {layer_idx} "
            "(compiled, wrapped or unusual model?); choose a compressor that needs none, such as presets.distinctive"
        )
    queries = caller.query_states
    scale = getattr(caller.module, "scaling", None) or queries.shape[-1] ** -0.5
    return queries * scale


def real_tokens(attention_mask: Any, batch: int, new: int) -> Tensor | None:
    """Which of the ``new`` last columns are real tokens, ``[B, new]`` bool, or None if all are.

    ``attention_mask`` is what the attention function is about to apply: nothing, a 4-D mask, bool or additive, flash
    attention's 2-D mask, or flex attention's BlockMask. A column is padding if not even the last query sees it.

    Raises:
        CacheError: a mask of a kind that cannot be read.
    """
    if attention_mask is None:
        return None
    if isinstance(attention_mask, Tensor):
        if attention_mask.ndim == 4:
            visible = attention_mask[:, 0, -1, :]
            visible = visible if visible.dtype == torch.bool else visible == 0  # additive: 0 or a large negative number
        else:
            visible = attention_mask != 0  # flash attention's, as users make them: 1 for tokens
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
