"""Attention over clusters, written out: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.guards import in_own_types


def degree_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, degree: Tensor, scale: float, causal: bool
) -> Tensor:
    """softmax_j(scale q.k_j + ln N_j) v_j in float32 (float64 for float64 input); see degree_attention."""
    with in_own_types(query.device):
        exact = torch.float64 if torch.float64 in (query.dtype, values.dtype) else torch.float32
        batch, query_heads, length, size = query.shape
        heads, slots = keys.shape[1], keys.shape[2]
        grouped = query.to(exact).reshape(batch, heads, query_heads // heads, length, size)
        logits = scale * grouped @ keys.to(exact)[:, :, None].mT + degree.to(exact).log()[:, :, None, None]
        if causal:
            place = torch.arange(slots, device=query.device)
            newest = torch.arange(slots - length, slots, device=query.device)
            logits = logits.masked_fill(place > newest[:, None], -torch.inf)
        # A query that sees no live slot has no softmax; its output is defined as zero.
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        return (weights @ values.to(exact)[:, :, None]).reshape(batch, query_heads, length, -1).to(query.dtype)
