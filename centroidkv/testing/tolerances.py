"""How far apart two right answers may be: derived from data types and data, not tuned.

Standard model of floating point: a sum of n products computed in any order is off by at most (n + 2) u times the sum of
the products' absolute values, u the unit roundoff of the type it is computed in; storing it adds u of the storage type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.state import accumulation_dtype


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff u of a type: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def sum_bound(magnitude: Tensor, terms: int, storage: torch.dtype) -> Tensor:
    """Bound for a sum of ``terms`` products whose absolute values add up to ``magnitude``, stored as ``storage``.

    Both answers compared may be off, hence the factor two.
    """
    work = accumulation_dtype(storage)
    smallest = torch.finfo(storage).tiny
    return 2 * ((terms + 2) * roundoff(work) + roundoff(storage)) * magnitude.double() + smallest


def score_bound(a: Tensor, b: Tensor, scores: Tensor, normalised: bool) -> Tensor:
    """Bound for similarity scores of ``a [..., m, D]`` and ``b [..., n, D]``, shaped like ``scores``.

    A cosine multiplies unit vectors; other scores grow with the vectors. A distance may be the root of a square that
    was found as a difference, |a|^2 + |b|^2 - 2 a.b; an error e of the square is one of e / distance, at most its root.
    The unit roundoff is the coarser one of the vectors' and the scores' types: scores may be cast once they are there.
    """
    size = a.shape[-1]
    types = [a.dtype, *([scores.dtype] if scores.is_floating_point() else [])]
    rounding = 8 * (size + 4) * max(roundoff(dtype) for dtype in types)
    if normalised:
        return torch.full_like(scores, rounding, dtype=torch.float64)
    norms = torch.linalg.vector_norm(a.double(), dim=-1)[..., :, None], torch.linalg.vector_norm(b.double(), dim=-1)
    other = norms[1][..., None, :]
    magnitude = torch.maximum(norms[0] * other, norms[0] + other)
    square = rounding * (norms[0] + other).square()
    distance = torch.cdist(a.double(), b.double(), compute_mode="use_mm_for_euclid_dist")
    return rounding * magnitude + square / torch.maximum(distance, square.sqrt()).clamp(min=1e-300)


def attention_bound(query: Tensor, keys: Tensor, values: Tensor, degree: Tensor, scale: float) -> float:
    """Bound for attention outputs: logits are off by e, so weights by a factor exp(2 e), outputs by that of max |v|.

    Kernels may hold logits and weights in the storage type between steps; a score and ln N are then rounded too.
    """
    if not keys.shape[2]:
        return 0.0
    size, slots = keys.shape[-1], keys.shape[2]
    storage = roundoff(query.dtype)
    largest = (
        scale
        * torch.linalg.vector_norm(query.double(), dim=-1).max()
        * torch.linalg.vector_norm(keys.double(), dim=-1).max()
    )
    logs = degree.clamp(min=1).double().log().max()
    work = roundoff(accumulation_dtype(query.dtype))
    logit_error = (size + 2) * work * largest + (storage + work) * (largest + logs)
    return float(values.double().abs().max() * (torch.expm1(2 * logit_error) + 4 * storage + (slots + 4) * work))
