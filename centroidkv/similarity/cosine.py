"""Cosine similarity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.similarity.options import KeyView


@dataclass(frozen=True)
class Cosine(KeyView):
    """cos(a, b) = a.b / (|a| |b|), in [-1, 1] up to rounding; 0 where a vector is zero. Ignores the keys' scale.

    Args:
        rope: see :class:`~centroidkv.similarity.options.KeyView`, as ``heads``.
        heads: likewise.
        step: round similarities to multiples of this, in (0, 1], before they are compared. In the first layer a key
            depends on its token and its place alone, so equal tokens equally far apart tie exactly, and errors of
            1e-7 in the keys would decide. With a step of 2^-8 the earliest wins, in whatever batch or on whatever
            machine the keys were computed.

    >>> Cosine()(torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 1.0]]))
    tensor([[1., 0.]])
    """

    step: float | None = field(default=None, kw_only=True)

    formula: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is not None and not 0 < self.step <= 1:
            raise StageError(f"step is what similarities are rounded to multiples of, in (0, 1], got {self.step!r}")

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        similarity = _unit(a) @ _unit(b).mT
        return similarity if self.step is None else (similarity / self.step).round() * self.step


def _unit(x: Tensor) -> Tensor:
    # Dividing by the largest entry first keeps the squares inside float32 for keys of any finite size.
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=tiny)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=tiny)
