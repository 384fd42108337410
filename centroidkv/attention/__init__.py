"""Attention over a compressed cache: every slot counts as many times as it has members."""

from __future__ import annotations

import math

from torch import Tensor

from centroidkv.attention.limits import kernel_fits, require_kernel
from centroidkv.attention.paged import paged_degree_attention
from centroidkv.attention.reference import degree_attention_reference
from centroidkv.attention.sdpa import degree_attention_sdpa
from centroidkv.errors import BackendError, DeviceError, DtypeError, ShapeError

FEW_QUERIES = 16
"""Up to so many new tokens "auto" takes the kernel that splits the slots; more fill a GPU without splitting."""

__all__ = ["chosen_backend", "degree_attention", "paged_degree_attention"]


def _triton(query: Tensor, keys: Tensor, values: Tensor, degree: Tensor, scale: float, causal: bool) -> Tensor:
    from centroidkv.attention.triton import degree_attention_triton

    return degree_attention_triton(query, keys, values, degree, scale, causal)


BACKENDS = {"reference": degree_attention_reference, "sdpa": degree_attention_sdpa, "triton": _triton}


def degree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    backend: str = "auto",
) -> Tensor:
    """softmax_j(scale q.k_j + ln N_j) v_j: attention in which slot j stands for N_j tokens.

    Equals full attention over the tokens if the members of every cluster share one key, whatever their values.

    Args:
        query: ``[B, Hq, L, D]``; Hq a multiple of H, query head h reads KV head h // (Hq / H).
        keys: ``[B, H, T, D]``, same dtype and device as the query.
        values: ``[B, H, T, Dv]``, same device; any floating point type (of another than the keys' under autocast).
        degree: ``[B, H, T]`` float32; 0 masks a slot, which must hold finite numbers all the same.
        scale: factor on q.k; default 1 / sqrt(D).
        causal: the queries are the newest L tokens and own the last L slots: query i does not see slots after
            T - L + i. False: every query sees every slot. No difference for L = 1.
        backend: "reference" (explicit, float32), "sdpa" (PyTorch's fused attention, grouped queries packed), "triton"
            (a kernel that splits the slots; no gradients, one type for all), or "auto": triton for up to 16 queries on
            a GPU if it can compute them, else sdpa. Of two types, reference and sdpa compute in the wider one.
            Under torch.autocast sdpa rounds as PyTorch's attention does there; the reference does not.

    Returns:
        ``[B, Hq, L, Dv]`` in the query's dtype. A query that sees no live slot gets zeros.

    Raises:
        ShapeError, DtypeError, DeviceError, BackendError.

    >>> import torch
    >>> q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> degree_attention(q, k, v, torch.ones(1, 2, 6)).shape
    torch.Size([1, 4, 1, 8])
    """
    _check(query, keys, values, degree, causal)
    if backend == "auto":
        backend = chosen_backend(query, keys, values)
    if backend not in BACKENDS:
        raise BackendError(f"backend is 'auto' or one of {sorted(BACKENDS)}, got {backend!r}")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if backend == "triton":
        require_kernel(query, keys, values)  # also where there is nothing to compute
    if keys.shape[2] == 0 or query.numel() == 0 or values.shape[3] == 0:
        return query.new_zeros(*query.shape[:3], values.shape[-1])
    return BACKENDS[backend](query, keys, values, degree, scale, causal)


def chosen_backend(query: Tensor, keys: Tensor, values: Tensor) -> str:
    """What "auto" runs for such tensors.

    >>> import torch
    >>> chosen_backend(*torch.zeros(3, 1, 1, 1, 8))
    'sdpa'
    """
    few = query.device.type == "cuda" and query.shape[2] <= FEW_QUERIES
    return "triton" if few and kernel_fits(query, keys, values) else "sdpa"


def _check(query: Tensor, keys: Tensor, values: Tensor, degree: Tensor, causal: bool) -> None:
    if not all(isinstance(tensor, Tensor) for tensor in (query, keys, values, degree)):
        kinds = [type(tensor).__name__ for tensor in (query, keys, values, degree)]
        raise ShapeError(f"query, keys, values and degree must be tensors, got {kinds}; degree of raw tokens is ones")
    if query.ndim != 4 or keys.ndim != 4 or values.ndim != 4:
        raise ShapeError(
            "query, keys and values must be [B, heads, length, size], got "
            f"{tuple(query.shape)}, {tuple(keys.shape)}, {tuple(values.shape)}"
        )
    if keys.shape[:3] != values.shape[:3] or degree.shape != keys.shape[:3]:
        raise ShapeError(
            f"keys {tuple(keys.shape)}, values {tuple(values.shape)} and degree {tuple(degree.shape)} must agree in "
            "B, H and T"
        )
    if query.shape[0] != keys.shape[0] or query.shape[3] != keys.shape[3]:
        raise ShapeError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)} in batch or key size")
    if query.shape[3] == 0:
        raise ShapeError(f"keys have size 0: {tuple(keys.shape)}")
    if keys.shape[1] == 0 or query.shape[1] % keys.shape[1]:
        raise ShapeError(f"{query.shape[1]} query heads are not a multiple of {keys.shape[1]} KV heads")
    if causal and query.shape[2] > keys.shape[2] > 0:
        raise ShapeError(
            f"{query.shape[2]} causal queries need at least as many slots, got {keys.shape[2]}: append the new "
            "tokens' keys and values before attending, or pass causal=False"
        )
    if not query.dtype.is_floating_point:
        raise DtypeError(f"attention needs floating point numbers, got {query.dtype}")
    if query.dtype != keys.dtype or not values.dtype.is_floating_point:
        raise DtypeError(
            f"query and keys must share a dtype, and values be floating point, got {query.dtype}, {keys.dtype} and "
            f"{values.dtype}"
        )
    devices = {str(tensor.device) for tensor in (query, keys, values, degree)}
    if len(devices) > 1:
        raise DeviceError(f"attention runs on one device, got {sorted(devices)}")
