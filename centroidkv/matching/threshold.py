"""Matching by a similarity threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.matching.candidates import best, best_targets
from centroidkv.protocols import Similarity
from centroidkv.records import Assignment, Partition


@dataclass(frozen=True)
class ThresholdMatching:
    """Bipartite soft matching that refuses pairs less similar than a threshold.

    Of the proposals with s_a >= threshold, the best ``edges`` are carried out: quality bounds the compression instead
    of the other way round. Heads may then keep different numbers of slots (the shorter ones start with empty slots),
    and a result over its budget says so with a BudgetNotMetWarning.

    Args:
        threshold: least similarity of a merge, on the scale of the similarity (for Cosine at most 1).
    """

    threshold: float = 0.9
    exact = False

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, int | float) or math.isnan(self.threshold):
            raise StageError(f"ThresholdMatching takes a number, got {self.threshold!r}")

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int
    ) -> Assignment:
        candidates = best_targets(keys, partition, similarity)
        return candidates.accept(best(candidates.score, edges) & (candidates.score >= self.threshold))
