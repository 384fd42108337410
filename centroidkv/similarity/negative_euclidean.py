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
    tensor([[ 0., -5.]])
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        # The matrix-product form is faster but cancels near zero, which is exactly where neighbours are compared.
        return -torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
