"""Cosine similarity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.similarity.options import KeyView


@dataclass(frozen=True)
class Cosine(KeyView):
    """cos(a, b) = a.b / (|a| |b|), in [-1, 1] up to rounding; 0 where a vector is zero. Ignores the keys' scale.

    >>> Cosine()(torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 1.0]]))
    tensor([[1., 0.]])
    """

    formula: ClassVar[str] = "cosine"

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return _unit(a) @ _unit(b).mT


def _unit(x: Tensor) -> Tensor:
    # Dividing by the largest entry first keeps the squares inside float32 for keys of any finite size.
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=tiny)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=tiny)
