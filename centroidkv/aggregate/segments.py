"""Sums over clusters. Not a stage itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.records import Assignment
from centroidkv.state import IMPORTANCE, KVState


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


def add_importance(merged: KVState, before: KVState, assignment: Assignment) -> KVState:
    """Slots that merged weigh what their members weighed: importance is a sum, unlike other slot data."""
    if IMPORTANCE not in before.slot_data:
        return merged
    own = before.slot_data[IMPORTANCE]
    return replace(merged, slot_data={**merged.slot_data, IMPORTANCE: own + sum_merges(own, assignment)})
