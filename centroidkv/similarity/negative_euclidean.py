"""Negative Euclidean distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.similarity.options import KeyView


@dataclass(frozen=True)
class NegativeEuclidean(KeyView):
    """-|a - b|: 0 for equal keys, falling with distance. The distance that bounds the error of a merge.

    >>> NegativeEuclidean()(torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([[-0., -5.]])
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        # As a matrix product |a|^2 + |b|^2 - 2 a.b cancels near zero, exactly where neighbours are compared. In float64
        # what is left is below 1e-7 of the keys' norm, and much faster than subtracting pair by pair.
        distance = torch.cdist(a.double(), b.double(), compute_mode="use_mm_for_euclid_dist")
        return -distance.to(a.dtype)
