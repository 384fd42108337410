"""Attention of one new token per request over a cache held in blocks, as serving engines keep it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from centroidkv.attention.limits import kernel_fits, require_kernel
from centroidkv.attention.paged.native import paged_degree_attention_native
from centroidkv.attention.paged.reference import paged_degree_attention_reference
from centroidkv.attention.paged.sdpa import paged_degree_attention_sdpa
from centroidkv.errors import BackendError, DeviceError, DtypeError, ShapeError

__all__ = ["paged_degree_attention"]


def _triton(*arguments: Tensor, scale: float) -> Tensor:
    from centroidkv.attention.paged.triton import paged_degree_attention_triton

    return paged_degree_attention_triton(*arguments, scale=scale)


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": paged_degree_attention_reference,
    "sdpa": paged_degree_attention_sdpa,
    "native": paged_degree_attention_native,
    "triton": _triton,
}


def paged_degree_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    log_degree: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax_j(scale q.k_j + ln N_j) v_j over the first ``lengths[r]`` slots of request r.

    Slot t of request r is slot ``t % block`` of block ``block_table[r, t // block]``. Requests may share blocks.

    Args:
        query: ``[R, Hq, D]``, one new token per request; query head h reads KV head h // (Hq / H).
        key_blocks: ``[N, block, H, D]``, same dtype and device as the query; any strides.
        value_blocks: ``[N, block, H, Dv]``, same device; any floating point type.
        log_degree: ``[N, block, H]`` float32, ln N; 0 = a raw token, -inf = an empty slot, which must hold finite
            numbers all the same. Slots behind a request's length may hold anything.
        block_table: ``[R, M]`` int32; entries behind a request's length may be anything.
        lengths: ``[R]`` int32, slots in use, 0 to M * block. On the CPU this and the entries of the table are
            checked; on a GPU they are trusted, because reading them would make it wait.
        scale: factor on q.k; default 1 / sqrt(D).
        backend: "reference" (explicit, float32, request by request), "sdpa" (PyTorch's fused attention over gathered
            blocks), "native" (a compiled loop over the blocks as they lie, on the CPU), "triton" (no gradients), or
            "auto": triton on a GPU if it can compute this, else sdpa. Native and triton want one type for all.

    Returns:
        ``[R, Hq, Dv]`` in the query's dtype. A request without live slots gets zeros.

    Raises:
        ShapeError, DtypeError, DeviceError, BackendError.

    >>> blocks = torch.randn(3, 16, 2, 8)
    >>> table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    >>> paged_degree_attention(torch.randn(1, 4, 8), blocks, blocks, torch.zeros(3, 16, 2), table, lengths).shape
    torch.Size([1, 4, 8])
    """
    arguments = (query, key_blocks, value_blocks, log_degree, block_table, lengths)
    _check(*arguments)
    if backend == "auto":
        fits = query.device.type == "cuda" and kernel_fits(query, key_blocks, value_blocks)
        backend = "triton" if fits else "sdpa"
    if backend not in BACKENDS:
        raise BackendError(f"backend is 'auto' or one of {sorted(BACKENDS)}, got {backend!r}")
    if backend == "triton":
        require_kernel(query, key_blocks, value_blocks)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.numel() == 0 or value_blocks.shape[-1] == 0 or block_table.shape[1] == 0 or key_blocks.shape[0] == 0:
        return query.new_zeros(*query.shape[:2], value_blocks.shape[-1])
    return BACKENDS[backend](*arguments, scale=scale)


def _check(
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, log_degree: Tensor, block_table: Tensor, lengths: Tensor
) -> None:
    if query.ndim != 3 or key_blocks.ndim != 4 or value_blocks.ndim != 4:
        raise ShapeError(
            "query must be [R, Hq, D], key_blocks and value_blocks [N, block, H, size], got "
            f"{tuple(query.shape)}, {tuple(key_blocks.shape)}, {tuple(value_blocks.shape)}"
        )
    if key_blocks.shape[:3] != value_blocks.shape[:3] or log_degree.shape != key_blocks.shape[:3]:
        raise ShapeError(
            f"key_blocks {tuple(key_blocks.shape)}, value_blocks {tuple(value_blocks.shape)} and log_degree "
            f"{tuple(log_degree.shape)} must agree in N, block and H"
        )
    requests, query_heads, size = query.shape
    blocks, block, heads = log_degree.shape
    if block == 0 or size == 0 or size != key_blocks.shape[3]:
        raise ShapeError(f"query {tuple(query.shape)} does not fit key_blocks {tuple(key_blocks.shape)} in key size")
    if heads == 0 or query_heads % heads:
        raise ShapeError(f"{query_heads} query heads are not a multiple of {heads} KV heads")
    if block_table.ndim != 2 or block_table.shape[0] != requests or lengths.shape != (requests,):
        raise ShapeError(
            f"{requests} requests need block_table [{requests}, M] and lengths [{requests}], got "
            f"{tuple(block_table.shape)} and {tuple(lengths.shape)}"
        )
    floats = query.dtype.is_floating_point and value_blocks.dtype.is_floating_point
    if not floats or query.dtype != key_blocks.dtype:
        raise DtypeError(
            "query and key_blocks must share one floating point dtype, and value_blocks have one, got "
            f"{query.dtype}, {key_blocks.dtype}, {value_blocks.dtype}"
        )
    if log_degree.dtype != torch.float32:
        raise DtypeError(f"log_degree must be float32, got {log_degree.dtype}; degrees are more exact than keys")
    if block_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise DtypeError(f"block_table and lengths must be int32, got {block_table.dtype} and {lengths.dtype}")
    tensors = (query, key_blocks, value_blocks, log_degree, block_table, lengths)
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise DeviceError(f"attention runs on one device, got {sorted(devices)}")
    if query.device.type != "cpu" or requests == 0:
        return
    capacity = block_table.shape[1] * block
    if lengths.min() < 0 or lengths.max() > capacity:
        raise ShapeError(f"lengths must be 0 to {capacity} ({block_table.shape[1]} blocks of {block}), got {lengths}")
    used = torch.arange(block_table.shape[1], device=lengths.device) * block < lengths[:, None]
    entries = block_table[used]
    if ((entries < 0) | (entries >= blocks)).any():
        raise ShapeError(f"block_table names blocks 0 to {blocks - 1} up to a request's length, got {block_table}")
