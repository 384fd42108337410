"""The recent window."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.records import exact_share
from centroidkv.state import KVState


@dataclass(frozen=True)
class Recent:
    """The last ``slots`` slots, or a ``share`` of the free budget.

    >>> Recent(64), Recent(share=0.25)
    (Recent(slots=64, share=None), Recent(slots=None, share=0.25))
    """

    slots: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.slots is None) == (self.share is None):
            raise StageError(f"Recent takes either slots or a share, got slots={self.slots!r}, share={self.share!r}")
        if self.slots is not None and (not isinstance(self.slots, int) or self.slots < 0):
            raise StageError(f"Recent takes a whole number of slots >= 0, got {self.slots!r}")
        if self.share is not None and not 0 < self.share <= 1:
            raise StageError(f"Recent takes a share in (0, 1], got {self.share!r}")

    def count(self, free_budget: int) -> int:
        if self.share is None:
            return int(self.slots or 0)
        return math.floor(exact_share(self.share, free_budget))

    def select(self, state: KVState, free: Tensor, count: int) -> Tensor:
        from_the_end = free.flip(-1).cumsum(-1).flip(-1)
        return free & (from_the_end <= count)
