"""Attention over clusters through PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def degree_attention_sdpa(
    query: Tensor, keys: Tensor, values: Tensor, degree: Tensor, scale: float, causal: bool
) -> Tensor:
    """The same sum with ln N as an additive bias.

    The query heads of a group are laid out as further queries of their KV head, [B, H, G * L, D]: keys are read once
    per KV head instead of being repeated, and one bias per KV head serves the whole group.
    """
    kind = query.dtype
    if values.dtype != kind:  # the kernels take one type
        query, keys, values = (x.to(torch.promote_types(kind, values.dtype)) for x in (query, keys, values))
    batch, query_heads, length, size = query.shape
    heads, slots = keys.shape[1], keys.shape[2]
    packed = query.reshape(batch, heads, query_heads // heads * length, size)
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    bias = degree.to(exact).log()[:, :, None, :]
    if causal and length > 1:
        place = torch.arange(slots, device=query.device)
        newest = torch.arange(slots - length, slots, device=query.device)
        hidden = (place > newest[:, None]).repeat(query_heads // heads, 1)
        bias = bias.masked_fill(hidden, -torch.inf)
    blind = bias.amax(-1, keepdim=True) == -torch.inf
    # Kernels differ on rows without a single finite logit; give such rows a harmless bias and zero them afterwards.
    # On the CPU it costs nothing to see that there are none, and every pass over the slots is one more wait for all
    # threads; a GPU would have to be waited for, and a compiler cannot look.
    if bias.device.type != "cpu" or torch.compiler.is_compiling() or blind.any():
        bias = bias.masked_fill(blind, 0.0)
    if query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cuda":
        bias = bias.to(query.dtype)  # CUDA kernels want the query's type; ln N < 16 keeps two decimals in it
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=bias, scale=scale)
    return out.masked_fill(blind, 0.0).reshape(batch, query_heads, length, -1).to(kind)
