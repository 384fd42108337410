"""Eviction: what is not preserved is given up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.protocols import Similarity
from centroidkv.records import Assignment, Partition


@dataclass(frozen=True)
class Evict:
    """Remove the earliest ``edges`` compressible slots without merging them: what every preserver has to beat.

    Their mass is lost, so degrees no longer add up to the tokens seen; ``KVState.seen`` still counts them. With shares
    that fill the budget, what preservers did not choose is exactly what goes.
    """

    needs_partition = False
    evicts = True

    def capacity(self, length: int) -> int:
        """All slots may go."""
        return length

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int
    ) -> Assignment:
        index = torch.arange(keys.shape[2], device=keys.device)
        return Assignment(torch.where(index < edges, -1, index).expand(keys.shape[:3]).contiguous())
