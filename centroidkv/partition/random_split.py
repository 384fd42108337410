"""A random half of every chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.partition.chunks import check_chunk_size, split_chunks
from centroidkv.records import Partition


@dataclass(frozen=True)
class RandomSplit:
    """A random half of each chunk are sources: the control that shows what any pattern is worth.

    The split is a pure function of (seed, chunk length): calling twice gives the same partition, and no global random
    state is read or moved. All full chunks of a sequence share one split.

    Args:
        seed: seed of the split.
        chunk_size: slots per chunk, >= 2; None = the whole sequence is one chunk.

    >>> a, b = RandomSplit(seed=3)(100), RandomSplit(seed=3)(100)
    >>> a.sources.tolist() == b.sources.tolist(), a.sources.numel()
    (True, 50)
    """

    seed: int = 0
    chunk_size: int | None = 256

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)

    def __call__(self, length: int) -> Partition:
        return split_chunks(length, self.chunk_size, self._split)

    def _split(self, size: int) -> Tensor:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))
        return torch.zeros(size, dtype=torch.bool).scatter(0, order[: size // 2], True)
