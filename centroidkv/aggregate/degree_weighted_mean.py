"""The centroid of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.aggregate.segments import flat_merges, sum_merges, sum_of_groups
from centroidkv.ranges import in_hull
from centroidkv.records import Assignment
from centroidkv.state import KVState, accumulation_dtype


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


def weighted_mean(x: Tensor, degree: Tensor, total: Tensor, assignment: Assignment) -> Tensor:
    """x_b + sum over t joining b of (n_t / N_b) (x_t - x_b), for every slot b that stays."""
    movers, targets = flat_merges(assignment)
    rows = x.reshape(assignment.joins.numel(), x.shape[-1])
    exact = accumulation_dtype(x.dtype)
    share = degree.flatten()[movers].to(exact) / total.flatten()[targets].clamp(min=torch.finfo(torch.float32).tiny)
    far, near = rows[movers].to(exact), rows[targets].to(exact)
    changed, which = targets.unique(return_inverse=True)

    def mean(scale: float) -> Tensor:
        a, b, own = (x if scale == 1 else x * scale for x in (far, near, rows[changed].to(exact)))
        return own + sum_of_groups(share[:, None] * (a - b), which, len(changed))

    # Only slots that something joined are written; a round moves a tenth of them, so the rest is not even read.
    return rows.index_copy(0, changed, in_hull(mean, x.dtype)).reshape(x.shape)
