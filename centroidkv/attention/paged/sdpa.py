"""Paged attention over clusters through PyTorch's scaled_dot_product_attention: all requests in one call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_degree_attention_sdpa(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    log_degree: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The same sum; see paged_degree_attention.

    Blocks are gathered head by head, so that each is one piece of memory where a head's slots of a block lie together
    (blocks as ``[N, H, block, D]``, transposed); the grouped query heads of a KV head are further queries of it.
    """
    kind = query.dtype
    if value_blocks.dtype != kind:  # the kernels take one type
        wide = torch.promote_types(kind, value_blocks.dtype)
        query, key_blocks, value_blocks = (x.to(wide) for x in (query, key_blocks, value_blocks))
    requests, query_heads, size = query.shape
    block, heads = log_degree.shape[1:]
    columns = block_table.shape[1]
    used = torch.arange(columns, device=query.device) * block < lengths[:, None]
    table = block_table.masked_fill(~used, 0).long()  # entries behind a request's length may be anything
    at = (table[:, None] * heads + torch.arange(heads, device=query.device)[:, None]).flatten()
    keys, values, bias = (
        _by_head(part).index_select(0, at).view(requests, heads, columns * block, -1)
        for part in (key_blocks, value_blocks, log_degree[..., None])
    )
    for request, length in enumerate(lengths.tolist()):
        # Slots behind the length may hold anything as well, and a weight of zero does not silence a NaN.
        keys[request, :, length:] = 0.0
        values[request, :, length:] = 0.0
        bias[request, :, length:] = -torch.inf
    bias = bias.mT
    blind = bias.amax(-1, keepdim=True) == -torch.inf
    packed = query.reshape(requests, heads, query_heads // heads, size)
    if query.dtype == torch.float64:
        bias = bias.double()
    elif query.dtype != torch.float32 and query.device.type == "cuda":
        bias = bias.to(query.dtype)
    if blind.any():  # a query that sees no live slot has no softmax; its output is defined as zero
        bias = bias.masked_fill(blind, 0.0)
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=bias, scale=scale)
    return out.masked_fill(blind, 0.0).reshape(requests, query_heads, -1).to(kind)


def _by_head(blocks: Tensor) -> Tensor:
    """``[N, block, H, X]`` as ``[N * H, block * X]``: without a copy if memory is laid out so."""
    split = blocks.transpose(1, 2)
    count, heads, block, size = split.shape
    outer, inner, slot, channel = split.stride()
    if (slot, channel) == (size, 1) and outer == heads * inner:
        return split.as_strided((count * heads, block * size), (inner, 1))
    return split.reshape(count * heads, block * size)
