"""Sums over clusters. Not a stage itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.ranges import in_hull
from centroidkv.records import Assignment
from centroidkv.state import KVState, accumulation_dtype


def sum_merges(x: Tensor, assignment: Assignment) -> Tensor:
    """Per slot, the sum of ``x [B, H, T, ...]`` over the slots that join it; 0 where none does."""
    movers, targets = flat_merges(assignment)
    rows = x.reshape(assignment.joins.numel(), -1)
    changed, sums = sum_by_target(rows[movers], targets)
    return torch.zeros_like(rows).index_copy(0, changed, sums).reshape(x.shape)


def flat_merges(assignment: Assignment) -> tuple[Tensor, Tensor]:
    """The slots that join another and the slots they join, as rows of tensors flattened to ``[B * H * T, ...]``."""
    joins = assignment.joins
    movers = assignment.merges.flatten().nonzero()[:, 0]
    return movers, movers - movers % max(joins.shape[-1], 1) + joins.flatten()[movers]


def sum_by_target(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ``targets [m]`` in order, and for each the sum of its ``rows [m, D]``; see :func:`sum_of_groups`."""
    changed, which = targets.unique(return_inverse=True)
    return changed, sum_of_groups(rows, which, len(changed))


def sum_of_groups(rows: Tensor, which: Tensor, count: int) -> Tensor:
    """``[count, D]``: the sums of the ``rows [m, D]`` of every group, ``which [m]`` says the group of a row.

    Deterministic: rows are added in their order on the CPU; on other devices in the order of a stable sort, because an
    indexed addition there adds in whatever order its atomics arrive.
    """
    if rows.device.type == "cpu":
        return rows.new_zeros(count, rows.shape[1]).index_add_(0, which, rows)
    lengths = torch.bincount(which, minlength=count)
    return torch.segment_reduce(rows[which.argsort(stable=True)], "sum", lengths=lengths, axis=0, initial=0)


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


def merge_slot_data(merged: KVState, before: KVState, assignment: Assignment) -> KVState:
    """``merged`` with the slot data of ``before``, where slots merged as each datum's rule says."""
    data = dict(merged.slot_data)
    for name, x in before.slot_data.items():
        rule = before.rule(name).merge
        if rule == "sum":
            data[name] = x + sum_merges(x, assignment).to(x.dtype)
        elif rule == "mean":
            rows = x.reshape(*x.shape[:3], -1)
            data[name] = weighted_mean(rows, before.degree, merged.degree, assignment).view(x.shape)
    return replace(merged, slot_data=data, slot_rules=before.slot_rules)
