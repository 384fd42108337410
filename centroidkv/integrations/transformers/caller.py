"""Finding the attention module that called ``cache.update``.

A cache is handed to ``generate`` without being told the model, yet it has to know three things before the first token:
whether the model's attention would ignore the degrees, how keys are rotated, and which tokens are padding. The calling
attention module knows all three. It is looked up once per forward pass through the interpreter's frames, which touches
nothing and works with any model; ``enable(model)`` or ``CentroidCache(config=model.config)`` make it unnecessary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import BackendError

MAX_DEPTH = 16
"""Frames between ``update`` and the attention module's forward: two in plain models, a few more under wrappers."""
OUTWARD = 32
"""Frames from there to the forward of the model, which was given the 2-D padding mask."""


CROSS = ("key_value_states", "cross_attention_states")
"""Arguments of an attention module that attends to something else than its own tokens."""


@dataclass(frozen=True)
class Caller:
    """The attention module in whose forward ``update`` was called, and the mask it is about to apply.

    Args:
        module: the attention module.
        attention_mask: the mask it was given.
        query_states: its queries.
        mask_seen: whether it has an argument named attention_mask, so that None means that there is no mask.
        crosses: whether it attends to another model's states (an encoder's, an image's).
        padding_mask: the 2-D mask ``[B, tokens]``, 1 for tokens, that the model was given, if any. The module's mask is
            made from it and may leave out its first columns.
    """

    module: Any
    attention_mask: Any
    query_states: Any = None
    mask_seen: bool = True
    crosses: bool = False
    padding_mask: Tensor | None = None


def find_caller(outward: bool = False) -> Caller | None:
    """The nearest attention module on the call stack: a module with ``layer_idx`` and ``config``. None if hidden.

    ``outward``: look for the model's 2-D padding mask as well, which is further out; once in a pass is enough.
    """
    frame = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        local = frame.f_locals
        candidate = local.get("self")
        if isinstance(candidate, torch.nn.Module) and hasattr(candidate, "layer_idx") and hasattr(candidate, "config"):
            return Caller(
                candidate,
                local.get("attention_mask"),
                local.get("query_states"),
                mask_seen="attention_mask" in local,
                crosses=any(local.get(name) is not None for name in CROSS),
                padding_mask=_padding_mask(frame) if outward else None,
            )
        frame = frame.f_back  # type: ignore[assignment]
    return None


def config_of_mask() -> Any:
    """The configuration for which transformers is making a mask just now, which is the running model's; None if none.

    Masks are made before a compiled step, outside its graph.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        config = frame.f_locals.get("config")
        if frame.f_globals.get("__name__") == "transformers.masking_utils" and config is not None:
            return config
        frame = frame.f_back
    return None


def _padding_mask(frame: FrameType) -> Tensor | None:
    """The nearest 2-D mask among the arguments named attention_mask, from ``frame`` outward."""
    outer: FrameType | None = frame
    for _ in range(OUTWARD):
        if outer is None:
            return None
        mask = outer.f_locals.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return mask
        outer = outer.f_back
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
