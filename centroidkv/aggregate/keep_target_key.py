"""Averaged values under an unchanged key."""

from __future__ import annotations

from dataclasses import dataclass, replace

from centroidkv.aggregate.degree_weighted_mean import weighted_mean
from centroidkv.aggregate.segments import sum_merges
from centroidkv.records import Assignment
from centroidkv.state import KVState


@dataclass(frozen=True)
class KeepTargetKey:
    """k = k_b of the slot that stays, v = (sum n_t v_t) / N, N = sum n_t.

    A mean of keys rotated to different positions is shorter than its members; an actual key is not. The price is that
    the members' own directions are forgotten.
    """

    def __call__(self, state: KVState, assignment: Assignment) -> KVState:
        degree = state.degree + sum_merges(state.degree, assignment)
        return replace(state, degree=degree, values=weighted_mean(state.values, state.degree, degree, assignment))
