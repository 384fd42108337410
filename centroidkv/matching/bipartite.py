"""Bipartite soft matching."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.matching.candidates import best, best_targets
from centroidkv.protocols import Similarity
from centroidkv.records import Assignment, Partition


@dataclass(frozen=True)
class BipartiteSoftMatching:
    """Each source proposes its best target; the ``edges`` proposals of highest similarity are carried out.

    s_a = max_b sim(k_a, k_b); accept the top ``edges`` of s. Several sources may join one target. Exactly ``edges``
    slots leave; ties go to the earliest source.

    Args:
        rank: "sequence" ranks all proposals of a head together, so similar regions give more; "chunk" ranks within
            each chunk, every chunk giving its share of ``edges`` (to a whole number), so chunks are independent.

    Source: Bolya et al., *Token Merging*, arXiv 2210.09461; CentroidKV, arXiv 2506.11418. O(T c D) for chunks of c.
    """

    formula: ClassVar[str] = "soft"
    rank: str = "sequence"

    def __post_init__(self) -> None:
        if self.rank not in ("sequence", "chunk"):
            raise StageError(f"rank is 'sequence' or 'chunk', got {self.rank!r}")

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int
    ) -> Assignment:
        candidates = best_targets(keys, partition, similarity)
        if self.rank == "sequence":
            return candidates.accept(best(candidates.score, edges))
        sizes = candidates.chunk_sizes
        quotas = share_out(edges, sizes)
        chosen = [best(score, quota) for score, quota in zip(candidates.score.split(sizes, -1), quotas, strict=True)]
        return candidates.accept(torch.cat(chosen, -1) if chosen else candidates.score.bool())


def share_out(total: int, sizes: list[int]) -> list[int]:
    """Split ``total`` over parts in proportion to their sizes: whole numbers, adding up, none above its size.

    Cumulative rounding: part c gets floor(total * S_c / S) - floor(total * S_{c-1} / S) with cumulative sizes S_c.

    >>> share_out(5, [4, 4, 2])
    [2, 2, 1]
    """
    whole = max(sum(sizes), 1)
    marks = [total * end // whole for end in itertools.accumulate(sizes, initial=0)]
    return [after - before for before, after in itertools.pairwise(marks)]
