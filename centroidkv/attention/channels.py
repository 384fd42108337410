"""Degrees for attention kernels that take no bias: ln N as two more channels of the keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from centroidkv.errors import DtypeError, ShapeError

ABSENT = -(2.0**14)
"""Stands for ln 0: finite in every type, and far below any logit, so that exp gives exactly 0 next to a live slot."""


def with_degree_channels(
    query: Tensor, keys: Tensor, degree: Tensor, scale: float, *, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Widen queries and keys so that ``scale * q'.k' = scale * q.k + ln N`` in any kernel, at the same scale.

    q' = [q, s, s], k' = [k, hi, lo] with hi + lo = ln N / (scale * s): hi is the sum in the keys' type, lo what that
    rounding left, so that ln N is off by at most u^2 ln N (u the type's unit roundoff), not u ln N. s is the power of
    two nearest to 1 / scale, exact in every type; hi is then about ln N, whatever the scale.

    The kernel must accumulate q'.k' in float32 or better, as they all do, and be given ``scale``: its default would
    follow the wider size. Values stay as they are (pad them with zeros where a kernel wants one size for all).

    Args:
        query: ``[B, Hq, L, D]``; Hq a multiple of H.
        keys: ``[B, H, T, D]``, same dtype.
        degree: ``[B, H, T]`` float32, 0 for slots to leave out; a query that sees no other slot gets the mean of all it
            sees, which no kernel tells apart (:func:`~centroidkv.attention.degree_attention` gives zeros).
        scale: the kernel's factor on q.k, > 0.
        multiple: zeros are added until the size is a multiple of it (kernels like 8).

    Returns:
        Query ``[B, Hq, L, D']`` and keys ``[B, H, T, D']``, D' >= D + 2, in the query's dtype.

    Raises:
        ShapeError: degree does not fit the keys, sizes differ, or the scale is not a positive number.
        DtypeError: the query is not of the keys' floating point type.

    >>> q, k, n = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8), torch.full((1, 2, 6), 3.0)
    >>> wide = with_degree_channels(q, k, n, scale=0.5)
    >>> [tuple(x.shape) for x in wide]
    [(1, 4, 1, 10), (1, 2, 6, 10)]
    """
    if keys.ndim != 4 or degree.shape != keys.shape[:3] or query.shape[-1] != keys.shape[-1]:
        raise ShapeError(
            f"query {tuple(query.shape)} and keys {tuple(keys.shape)} must be [B, heads, length, D] with one D, and "
            f"degree {tuple(degree.shape)} [B, H, T] of the keys"
        )
    if not (scale > 0 and math.isfinite(scale)):
        raise ShapeError(f"scale is the kernel's positive factor on q.k, such as D ** -0.5, got {scale!r}")
    if query.dtype != keys.dtype or not keys.dtype.is_floating_point:
        raise DtypeError(f"query and keys must share a floating point type, got {query.dtype} and {keys.dtype}")
    steps = 2.0 ** round(-math.log2(scale))
    exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
    logs = degree.to(exact).log() / (scale * steps)
    logs = logs.masked_fill(degree == 0, ABSENT)
    high = logs.to(keys.dtype)
    low = (logs - high.to(exact)).to(keys.dtype)
    extra = -(keys.shape[-1] + 2) % multiple
    wide_keys = torch.cat((keys, high[..., None], low[..., None]), -1)
    wide_query = pad(query, (0, 2), value=steps)
    return pad(wide_query, (0, extra)), pad(wide_keys, (0, extra))
