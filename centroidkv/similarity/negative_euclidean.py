"""Negative Euclidean distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.ranges import largest_of, power_of_two, require_finite
from centroidkv.similarity.options import KeyView


@dataclass(frozen=True)
class NegativeEuclidean(KeyView):
    """-|a - b|: 0 for equal keys, falling with distance. The distance that bounds the error of a merge.

    Raises:
        NonFiniteError: a distance leaves the keys' type (two opposite keys near its largest number).

    >>> NegativeEuclidean()(torch.tensor([[3.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([[-0., -5.]])
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        # As a matrix product |a|^2 + |b|^2 - 2 a.b cancels near zero, exactly where neighbours are compared. In float64
        # what is left is below 1e-7 of the keys' norm, and much faster than subtracting pair by pair.
        # Beyond 2^400 squares leave float64, and below 2^-400 they vanish: such keys are scaled, exactly.
        longest = torch.maximum(*(largest_of(x, (-2, -1)).double() for x in (a, b)))
        odd = (longest > 2.0**400) | ((longest < 2.0**-400) & (longest > 0))
        x, y, scale = a.double(), b.double(), None
        if bool(odd.any()):
            scale = torch.where(odd, power_of_two(longest), 1.0)
            x, y = x * scale, y * scale
        distance = torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")
        distance = (distance if scale is None else distance / scale).to(a.dtype)
        if bool((longest < torch.finfo(a.dtype).max / (4 * a.shape[-1] + 4)).all()):
            return -distance
        return -require_finite(
            distance,
            f"{self!r} compares keys so far apart that distances leave {a.dtype}; use Cosine(), or look for an "
            "overflow upstream",
        )
