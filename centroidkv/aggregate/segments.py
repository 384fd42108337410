"""Sums over clusters. Not a stage itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.records import Assignment
from centroidkv.state import KVState


def sum_merges(x: Tensor, assignment: Assignment) -> Tensor:
    """Per slot, the sum of ``x [B, H, T, ...]`` over the slots that join it; 0 where none does.

    Deterministic: contributions are added in slot order on the CPU; on other devices in the order of a stable sort,
    because a scatter there adds in whatever order its atomics arrive.
    """
    merges = assignment.merges.reshape(*assignment.joins.shape, *(1,) * (x.ndim - 3))
    x = torch.where(merges, x, torch.zeros((), dtype=x.dtype, device=x.device))
    target = assignment.joins.clamp(min=0)
    if x.device.type == "cpu":
        wide = target.reshape(merges.shape).expand_as(x)
        return torch.zeros_like(x).scatter_add(2, wide, x)
    batch, heads, slots = target.shape
    stream = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * slots
    flat = (target + stream).flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=batch * heads * slots)
    rows = x.reshape(batch * heads * slots, -1)[order]
    return torch.segment_reduce(rows, "sum", lengths=counts, axis=0, initial=0).reshape(x.shape)


def add_importance(merged: KVState, before: KVState, assignment: Assignment) -> KVState:
    """Slots that merged weigh what their members weighed: the slot data "importance" is a sum, unlike any other."""
    if "importance" not in before.slot_data:
        return merged
    own = before.slot_data["importance"]
    return replace(merged, slot_data={**merged.slot_data, "importance": own + sum_merges(own, assignment)})
