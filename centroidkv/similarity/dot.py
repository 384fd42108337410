"""Dot product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from centroidkv.similarity.options import KeyView


@dataclass(frozen=True)
class Dot(KeyView):
    """a.b: long keys attract, whatever their direction. The control that shows what normalising is worth.

    >>> import torch
    >>> Dot()(torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 1.0]]))
    tensor([[15.,  0.]])
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.mT
