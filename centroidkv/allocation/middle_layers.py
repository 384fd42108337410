"""More for the layers past the middle of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from centroidkv.errors import StageError


@dataclass(frozen=True)
class MiddleLayers:
    """Layers in ``[start, end)`` of a model's depth get ``ratio`` times the slots of the others.

    With m of L layers inside, ``share = L ratio / (m ratio + L - m)`` inside and ``1 / ratio`` of that outside. Where
    all layers or none are inside, they share evenly. The depth of layer i of n is (i + 1/2) / n.

    Exact strings are looked up in a few layers past the middle, and running text needs them no less than the others
    (analysis/quality.md, "Which layers"). Ours; that layers need different numbers of slots is the idea of *PyramidKV*,
    arXiv 2406.02069, which gives the lowest ones the most.

    Raises:
        StageError: not 0 <= start < end <= 1, or a ratio that is not positive.

    >>> MiddleLayers(start=0.5, end=0.75, ratio=3)([1 / 8, 3 / 8, 5 / 8, 7 / 8])
    [0.6666666666666666, 0.6666666666666666, 2.0, 0.6666666666666666]
    """

    start: float = 0.5
    end: float = 0.83
    ratio: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= 1:
            raise StageError(f"depths are 0 <= start < end <= 1, got start={self.start!r}, end={self.end!r}")
        if not (isfinite(self.ratio) and self.ratio > 0):
            raise StageError(f"ratio is how many times the others' slots, above 0, got {self.ratio!r}")

    @property
    def even(self) -> bool:
        """Whether all layers share alike."""
        return self.ratio == 1

    def __call__(self, depths: Sequence[float]) -> list[float]:
        weights = [self.ratio if self.start <= depth < self.end else 1.0 for depth in depths]
        mean = sum(weights) / max(len(weights), 1)
        return [weight / mean for weight in weights]
