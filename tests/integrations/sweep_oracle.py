"""What a compressed cache has to amount to, for any model: every token's own column, holding its centroid.

``exp(q.k + ln N) = N exp(q.k)``: a slot of degree N must weigh as much as N tokens that share its key and value. Here
they do: a stock cache keeps a column per token, and the plain model reads it with whatever it adds to its logits by
column (causal masks, windows, relative positions). Nothing is assumed of the model, and nothing of ours is used but the
clustering itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from centroidkv import Compressor, KVState
from centroidkv.integrations.transformers.layer import CentroidLayer


def self_attention(cache: Any) -> Any:
    """The cache of the tokens themselves; an EncoderDecoderCache holds another one for the encoder's."""
    return getattr(cache, "self_attention_cache", cache)


def members(compressor: Compressor, keys: Tensor) -> Tensor:
    """Which slot each token joined, ``[B, H, T]``: values that mark one token each are averaged into their slots."""
    tokens = keys.shape[2]
    marks = torch.eye(tokens).expand(*keys.shape[:3], tokens)
    shares = compressor(KVState.from_kv(keys, marks)).values  # [B, H, slots, T]
    assert bool(((shares > 0).sum(2) == 1).all()), "a token in no slot, or in two"
    return shares.argmax(2)


def placed(before: Any, cache: Any) -> Any:
    """A copy of the stock cache ``before`` in which every token holds what its slot in ``cache`` holds."""
    oracle = copy.deepcopy(before)
    for stock, layer in zip(self_attention(oracle).layers, self_attention(cache).layers, strict=False):
        if not isinstance(layer, CentroidLayer) or not layer.growing.events:
            continue
        state = layer.growing.state
        slots = members(layer.growing.compressor, stock.keys)
        degree = torch.zeros_like(state.degree).scatter_add_(2, slots, torch.ones(slots.shape))
        assert torch.equal(degree, state.degree), "the cache was clustered otherwise than its keys alone are"
        for name in ("keys", "values"):
            held = getattr(state, name)
            setattr(stock, name, held.gather(2, slots[..., None].expand(-1, -1, -1, held.shape[-1])))
    return oracle
