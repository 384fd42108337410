"""Attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.state import KVState


@dataclass(frozen=True)
class Sinks:
    """The first ``slots`` slots: models park unused attention on the first tokens, whatever they are.

    Source: Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, arXiv 2309.17453.
    """

    slots: int = 4
    share = None

    def __post_init__(self) -> None:
        if not isinstance(self.slots, int) or self.slots < 0:
            raise StageError(f"Sinks takes a whole number of slots >= 0, got {self.slots!r}")

    def count(self, free_budget: int) -> int:
        return self.slots

    def select(self, state: KVState, free: Tensor, count: int) -> Tensor:
        return free & (free.cumsum(-1) <= count)
