"""Every s-th slot is a target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.partition.chunks import check_chunk_size, split_chunks
from centroidkv.records import Partition


@dataclass(frozen=True)
class Strided:
    """The last slot of every run of ``stride`` slots is a target, the others are sources.

    The last run of a chunk may be shorter and ends in a target as well, so every source has one.

    Fewer targets than :class:`Alternating` (which is ``stride=2``), so more slots compete for each. A round still
    removes at most half of all slots.

    Args:
        stride: slots per target, >= 2.
        chunk_size: slots per chunk, >= 2; None = the whole sequence is one chunk.

    Source: Bolya & Hoffman, *Token Merging for Fast Stable Diffusion*, arXiv 2303.17604.

    >>> Strided(stride=3, chunk_size=None)(7).targets.tolist()
    [2, 5, 6]
    """

    stride: int = 4
    chunk_size: int | None = 256

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)
        if not isinstance(self.stride, int) or self.stride < 2:
            raise StageError(f"stride is a whole number >= 2, got {self.stride!r}")

    def __call__(self, length: int) -> Partition:
        return split_chunks(length, self.chunk_size, self._split)

    def _split(self, size: int) -> Tensor:
        index = torch.arange(size)
        return (index % self.stride != self.stride - 1) & (index != size - 1)
