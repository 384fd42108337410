"""First half of every chunk against its second half."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from centroidkv.partition.chunks import check_chunk_size, split_chunks
from centroidkv.records import Partition


@dataclass(frozen=True)
class Halves:
    """The first half of a chunk are sources, the second half targets ("sequential" in Token Merging's ablation).

    The control for :class:`Alternating`: the same sizes, but a source and its target are half a chunk apart.

    Args:
        chunk_size: slots per chunk, >= 2; None = the whole sequence is one chunk.

    >>> Halves(chunk_size=4)(6).sources.tolist()
    [0, 1, 4]
    """

    chunk_size: int | None = 256

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)

    def __call__(self, length: int) -> Partition:
        return split_chunks(length, self.chunk_size, lambda size: torch.arange(size) < size // 2)
