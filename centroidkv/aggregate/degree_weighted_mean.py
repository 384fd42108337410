"""The centroid of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from centroidkv.aggregate.segments import sum_merges, weighted_mean
from centroidkv.records import Assignment
from centroidkv.state import KVState


@dataclass(frozen=True)
class DegreeWeightedMean:
    """N = sum n_t, k = (sum n_t k_t) / N, v = (sum n_t v_t) / N over the members t of a cluster.

    Computed as k_b + sum (n_t / N) (k_t - k_b) around the slot b that stays: the same number, but a slot that nothing
    joined, or that only equal keys joined, comes out bit-identical. Sums are float32 (float64 for float64) whatever the
    storage type. A difference beyond the type's range is taken again at a quarter of the size, so the mean of finite
    members is finite and lies among them.

    Source: size-weighted mean of Token Merging, arXiv 2210.09461; CentroidKV, arXiv 2506.11418.
    """

    formula: ClassVar[str] = "degree-weighted mean"

    def __call__(self, state: KVState, assignment: Assignment) -> KVState:
        degree = state.degree + sum_merges(state.degree, assignment)
        return replace(
            state,
            degree=degree,
            keys=weighted_mean(state.keys, state.degree, degree, assignment),
            values=weighted_mean(state.values, state.degree, degree, assignment),
        )
