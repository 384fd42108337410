"""Per-slot scores that stages rank by; larger = more worth keeping. Each is a function KVState -> [B, H, T]."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.gram import factorise, gram
from centroidkv.ranges import largest_of, power_of_two, row_norms
from centroidkv.state import KVState, accumulation_dtype

RIDGE = 1e-4
"""Regulariser of the leverage, as a share of the mean squared key channel: keeps directions without data finite."""
ROUNDINGS = 8
"""Units of rounding by which a centred key may be off: its own, those of un-rotating it, and those of the mean."""


def leverage(state: KVState) -> Tensor:
    """How little the other keys explain this one: x_i^T (X^T X + eps I)^-1 x_i on centred keys X, >= 0.

    Rows are weighted by degree (a centroid counts as its members), so the mean and the Gram matrix are those of the
    tokens. O(T D^2). float32 (float64 for float64 keys). Source: statistical leverage; for KV caches, *Compactor*,
    arXiv 2507.08143.

    eps is RIDGE times the mean squared channel of X, or what rounding leaves of equal keys if that is more: with u the
    unit roundoff and K the keys before they are centred, (ROUNDINGS u)^2 times the mean squared channel of K. What
    rounding alone could amount to is taken off, so equal keys have the leverage 0, all of them, and of a thousand equal
    keys and another one all of the leverage is at the other. Finite for all finite keys, of any rank and length. Off by
    less than 1e-3 of itself plus 1e-6 in float32, wherever keys differ by more than their own rounding.
    """
    return leverage_of(state.keys, state.degree)


def leverage_of(rows: Tensor, degree: Tensor) -> Tensor:
    """Leverage of ``rows [B, H, T, D]`` of mass ``degree [B, H, T]``, such as keys or values; 0 for empty slots."""
    dtype, size = accumulation_dtype(rows.dtype), rows.shape[-1]
    if not rows.numel():
        return degree.new_zeros(degree.shape, dtype=dtype)
    mass, live = degree[..., None].to(dtype), degree > 0
    tiny = torch.finfo(torch.float32).tiny
    rows = rows.to(dtype)
    # Leverage does not depend on scale; squares of very long keys would leave float32.
    longest = rows.abs().amax(-1).masked_fill(~live, 0).amax(-1)[..., None, None]
    rows = rows / longest.clamp(min=torch.finfo(dtype).tiny)
    total = mass.sum(2, keepdim=True).clamp(min=tiny)
    mean = (mass * rows).sum(2, keepdim=True) / total
    x = rows.sub_(mean)
    matrix = gram(x, mass)
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    # The squared length of a centred key that is nothing but rounding.
    noise = (ROUNDINGS * torch.finfo(dtype).eps / 2) ** 2 * (
        mean.double().square().sum(-1, keepdim=True) + trace / total
    )
    factor = factorise(matrix, RIDGE, least=total * noise / size)
    # What such a key would be given on average, if it pointed anywhere: noise / D times the trace of the inverse.
    empty = noise / size * factor.root().square().sum((-2, -1), keepdim=True)
    return (factor.whiten(x).square().sum(-1) - empty[..., 0].to(dtype)).clamp(min=0).masked_fill(~live, 0)


PASSAGE = 7
"""Slots over which a passage's score is averaged, centred on its slot."""


def passages(state: KVState) -> Tensor:
    """How much the passage around a slot stands out, the same for all heads of a layer: what holds an exact fact.

    Leverage of the keys plus leverage of the values, each in standard deviations from its head's mean, averaged over
    heads and then over PASSAGE neighbouring slots. A fact is several tokens, and not every head finds all of them
    distinctive: pooling finds the whole phrase where single heads find scattered pieces of it. float32.
    """
    both = _standardised(leverage_of(state.keys, state.degree)) + _standardised(leverage_of(state.values, state.degree))
    pooled = both.mean(1, keepdim=True).float()
    if pooled.shape[-1]:
        padded = torch.nn.functional.pad(pooled, (PASSAGE // 2, PASSAGE // 2), mode="replicate")
        pooled = padded.unfold(-1, PASSAGE, 1).mean(-1)
    return pooled.expand(state.degree.shape).contiguous()


def _standardised(x: Tensor) -> Tensor:
    """Less the mean and over the standard deviation of its row; zeros for a row without spread."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


def cosine_to_mean(state: KVState) -> Tensor:
    """How much a key differs from the average direction: -cos(k_i, mean of normalised keys). 0 for a zero key.

    Source: *KeyDiff*, arXiv 2504.15364.
    """
    keys, norm = row_norms(state.keys.to(accumulation_dtype(state.keys.dtype)))
    unit = keys / norm.clamp_min(1e-12)
    mean = (state.degree[..., None] * unit).sum(2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(unit, mean, dim=-1)


def low_norm(state: KVState) -> Tensor:
    """Minus the L2 norm of the key: keys of small norm tend to receive attention. At least minus the largest number.

    Source: Devoto et al., *A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression*, arXiv 2406.11430.
    """
    keys = state.keys.to(accumulation_dtype(state.keys.dtype))
    scaled, norm = row_norms(keys)
    if scaled is keys:
        return -norm[..., 0]
    # In float64, where the norms of float32 keys differ as the keys do, whatever their lengths.
    norm = norm.double() / power_of_two(largest_of(keys, -1)).double()
    return -norm[..., 0].clamp(max=torch.finfo(torch.float64).max)
