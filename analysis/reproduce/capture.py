"""Queries, keys and values of a real model, layer by layer, as its attention sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from centroidkv import KVState
from centroidkv.queries import QUERIES, sample_queries

NAME = "centroidkv_recorder"


@dataclass(frozen=True)
class Layer:
    """``query [B, Hq, T, D]``, ``keys`` and ``values`` ``[B, H, T, D]`` after RoPE, and the scale of q.k."""

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float


_recordings: list[list[Layer]] = []
"""The lists being filled. The function below is registered as one and the same object each time: kvpress, once
imported, holds on to the functions it found registered, so a new closure per recording would never be called."""


# dropout comes by position where kvpress wraps the registered functions.
def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **kwargs: Any
) -> Any:
    scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])
    for layers in _recordings:
        layers.append(Layer(query.float(), key.float(), value.float(), scale))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, dropout=dropout, **kwargs)


@contextmanager
def recording(model: Any) -> Iterator[list[Layer]]:
    """While active, every attention call of ``model`` adds a Layer to the list."""
    layers: list[Layer] = []
    AttentionInterface.register(NAME, _record)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _recordings.append(layers)
    try:
        yield layers
    finally:
        _recordings.remove(layers)
        model.set_attn_implementation(before)


def asked(state: KVState, queries: Tensor) -> KVState:
    """``state`` with a sample of queries, as CentroidCache collects them.

    ``queries [B, Hq, n, D]``: those of tokens 0..n-1 after RoPE, times the scale of q.k.
    """
    if state.rotary is None:
        raise ValueError("queries are sampled as they were before RoPE, and this state has no rotary")
    positions = torch.arange(queries.shape[2]).expand(queries.shape[:3])
    sample = sample_queries(state.rotary.unrotate(queries, positions), state.heads)
    return replace(state, head_data={**state.head_data, QUERIES: sample})


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> list[Layer]:
    """One forward pass over ``ids [1, T]``."""
    with recording(model) as layers:
        model(ids, use_cache=False)
    return layers
