"""Paged attention over clusters, written out: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.guards import in_own_types


def paged_degree_attention_reference(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    log_degree: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
) -> Tensor:
    """softmax_j(scale q.k_j + ln N_j) v_j in float32 (float64 for float64 input); see paged_degree_attention."""
    exact = torch.float64 if torch.float64 in (query.dtype, value_blocks.dtype) else torch.float32
    requests, query_heads, size = query.shape
    block, heads = key_blocks.shape[1:3]
    out = query.new_zeros(requests, query_heads, value_blocks.shape[-1])
    with in_own_types(query.device):
        for request, length in enumerate(lengths.tolist()):
            used = block_table[request, : -(-length // block)].long()
            keys, values, bias = (
                x[used].flatten(0, 1)[:length].to(exact) for x in (key_blocks, value_blocks, log_degree)
            )
            grouped = query[request].to(exact).reshape(heads, query_heads // heads, size)
            logits = scale * grouped @ keys.permute(1, 2, 0) + bias.mT[:, None]
            # A query that sees no live slot has no softmax; its output is defined as zero.
            blind = (logits == -torch.inf).all(-1, keepdim=True)
            weights = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
            out[request] = (weights @ values.transpose(0, 1)).reshape(query_heads, -1).to(query.dtype)
    return out
