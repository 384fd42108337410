"""Paged attention over clusters on the CPU, straight from the blocks: the compiled library's loop."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from centroidkv.errors import BackendError
from centroidkv.native import TYPES, Attention, address, carried_out, library, why_not_native, why_not_these


def why_not(query: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> str | None:
    """Why the native kernel cannot compute this; None if it can."""
    return why_not_these(query, key_blocks, value_blocks) or why_not_native()


def paged_degree_attention_native(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    log_degree: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The same sum; see paged_degree_attention. Nothing is copied but what has no unit stride in its last dimension.

    Raises:
        BackendError: there is no compiled library, or it does not take such tensors.
        MemoryError: the library found too little memory for its work.
    """
    reason = why_not(query, key_blocks, value_blocks)
    if reason is not None:
        raise BackendError(f"backend='native' was asked for, but {reason}; use backend='auto'")
    query, key_blocks, value_blocks, block_table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key_blocks, value_blocks, block_table)
    )
    lengths = lengths.contiguous()
    requests, query_heads, size = query.shape
    block, heads, value_size = value_blocks.shape[1:]
    out = query.new_empty(requests, query_heads, value_size)
    # A few requests over long caches would leave threads idle: then each takes part of the slots.
    splits = max(1, min(-(-2 * torch.get_num_threads() // (requests * heads)), block_table.shape[1] // 4))
    numbers = Attention(
        requests, heads, query_heads // heads, size, value_size, block, splits, torch.get_num_threads(),
        *query.stride()[:2], *key_blocks.stride()[:3], *value_blocks.stride()[:3], *log_degree.stride(),
        block_table.stride(0), scale,
    )  # fmt: skip
    outcome = library().centroidkv_attend(
        TYPES[query.dtype], ctypes.byref(numbers), address(query), address(key_blocks), address(value_blocks),
        address(log_degree), address(block_table), address(lengths), address(out),
    )  # fmt: skip
    carried_out(outcome)
    return out
