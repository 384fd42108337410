"""Dot product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.ranges import largest_of, power_of_two, require_finite
from centroidkv.similarity.options import KeyView


@dataclass(frozen=True)
class Dot(KeyView):
    """a.b: long keys attract, whatever their direction. The control that shows what normalising is worth.

    Raises:
        NonFiniteError: a product leaves the keys' type, so the longest cannot be told apart.

    >>> Dot()(torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 1.0]]))
    tensor([[15.,  0.]])
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        longest = [largest_of(x, (-2, -1)).double() for x in (a, b)]
        if bool((longest[0] * longest[1] * a.shape[-1] < torch.finfo(a.dtype).max / 4).all()):
            return a @ b.mT
        # A sum may pass the end of the range on its way to a product within it: scaled, no sum does.
        scale = [power_of_two(size) for size in longest]
        products = (a.double() * scale[0]) @ (b.double() * scale[1]).mT / scale[0] / scale[1]
        return require_finite(
            products.to(a.dtype),
            f"{self!r} compares keys so long that their products leave {a.dtype}; use Cosine() or NegativeEuclidean(), "
            "or look for an overflow upstream",
        )
