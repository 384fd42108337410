"""Per-slot scores that stages rank by; larger = more worth keeping. Each is a function KVState -> [B, H, T]."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.state import KVState, accumulation_dtype

RIDGE = 1e-4
"""Regulariser of the leverage, as a share of the mean squared key channel: keeps directions without data finite."""


def leverage(state: KVState) -> Tensor:
    """How little the other keys explain this one: x_i^T (X^T X + eps I)^-1 x_i on centred keys X.

    Rows are weighted by degree (a centroid counts as its members), so the mean and the Gram matrix are those of the
    tokens. O(T D^2). float32. Source: statistical leverage; for KV caches, *Compactor*, arXiv 2507.08143.
    """
    return leverage_of(state.keys, state.degree)


def leverage_of(rows: Tensor, degree: Tensor) -> Tensor:
    """Leverage of ``rows [B, H, T, D]`` of mass ``degree [B, H, T]``, such as keys or values."""
    keys, mass = rows.to(accumulation_dtype(rows.dtype)), degree[..., None]
    # Leverage does not depend on scale; squares of very long keys would leave float32.
    keys = keys / keys.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    mean = (mass * keys).sum(2, keepdim=True) / mass.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    x = keys - mean
    gram = x.mT @ (mass * x)
    size = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    ridge = RIDGE * trace / size + torch.finfo(torch.float32).tiny
    factor = torch.linalg.cholesky(gram + ridge * torch.eye(size, dtype=gram.dtype, device=gram.device))
    return torch.linalg.solve_triangular(factor, x.mT, upper=False).square().sum(-2)


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
    """How much a key differs from the average direction: -cos(k_i, mean of normalised keys).

    Source: *KeyDiff*, arXiv 2504.15364.
    """
    unit = torch.nn.functional.normalize(state.keys.float(), dim=-1)
    mean = (state.degree[..., None] * unit).sum(2, keepdim=True)
    return -torch.nn.functional.cosine_similarity(unit, mean, dim=-1)


def low_norm(state: KVState) -> Tensor:
    """Minus the L2 norm of the key: keys of small norm tend to receive attention.

    Source: Devoto et al., *A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression*, arXiv 2406.11430.
    """
    return -torch.linalg.vector_norm(state.keys.float(), dim=-1)
