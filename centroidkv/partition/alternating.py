"""Alternation: even slots are sources, odd slots are targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from centroidkv.partition.chunks import check_chunk_size, split_chunks
from centroidkv.records import Partition


@dataclass(frozen=True)
class Alternating:
    """Every source sits between two targets, its nearest neighbours.

    Among all splits of a chunk into halves, alternation maximises the similarity between the halves if similarity
    falls with distance in a convex way (DESIGN.md, "Why alternation"). In a chunk of odd length the last slot is a
    source too, so one more source than targets; a lone last slot has no target and stays.

    Args:
        chunk_size: slots per chunk, >= 2; None = the whole sequence is one chunk.

    Source: Bolya et al., *Token Merging*, arXiv 2210.09461 (whole sequence); CentroidKV, arXiv 2506.11418 (chunks).

    >>> Alternating(chunk_size=4)(6).sources.tolist()
    [0, 2, 4]
    """

    formula: ClassVar[str] = "alternating"
    chunk_size: int | None = 256

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)

    def capacity(self, length: int) -> int:
        """The most slots that a round can remove, without listing them.

        >>> Alternating(chunk_size=4).capacity(7), Alternating(chunk_size=4)(7).capacity
        (3, 3)
        """
        size = self.chunk_size or max(length, 1)
        full, tail = divmod(length, size)
        sources = full * ((size + 1) // 2) * (size > 1) + (tail + 1) // 2 * (tail > 1)
        return min(sources, length // 2)

    def __call__(self, length: int) -> Partition:
        return split_chunks(length, self.chunk_size, lambda size: torch.arange(size) % 2 == 0)
