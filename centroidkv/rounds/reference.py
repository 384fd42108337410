"""Rounds stage by stage, whatever the stages are: the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.aggregate.segments import merge_slot_data
from centroidkv.dense import compact, map_dense, merge_sorted
from centroidkv.errors import StageError
from centroidkv.protocols import check_assignment, matcher_capacity
from centroidkv.ranges import in_hull
from centroidkv.records import Assignment
from centroidkv.rounds.backend import Backend
from centroidkv.rounds.stages import Stages
from centroidkv.state import KVState, accumulation_dtype
from centroidkv.traits import SimilarityTraits


def reference_rounds(stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
    """Bring the ``free [B, H, T]`` slots of ``state`` to ``sizes`` slots, one round per size; the others stay.

    Args:
        stages: what a round does.
        state: live slots only, prepared (:meth:`Stages.prepare`); every head has the same number of free ones.
        free: bool.
        sizes: free slots after each round; a matcher that is not exact may keep more.

    Raises:
        StageError: a stage returned something its family must not return.
    """
    # A stable sort of the mask lists the free slots first, each part still in order.
    order = (~free).byte().argsort(dim=-1, stable=True)
    count = int(free[0, 0].sum())
    kept, body = state.select(order[..., count:]), state.select(order[..., :count])
    for size in sizes:
        body = map_dense(body, lambda rows, size=size: one_round(stages, rows, size))  # type: ignore[misc]
    return replace(merge_sorted(kept, body), rounds=state.rounds + len(sizes))


def one_round(stages: Stages, state: KVState, size: int) -> KVState:
    """One round on free slots only: from ``state.slots`` to ``size``, or as far as the matcher can."""
    partition, matching, aggregate = stages.split(state.slots), stages.matching, stages.aggregate
    edges = min(state.slots - size, matcher_capacity(matching, partition))
    if edges < 1:
        return state
    keys, mass = comparable(stages, state)
    assignment = matching(keys, mass, partition, stages.similarity, edges)
    if not isinstance(assignment, Assignment):
        raise StageError(f"{matching!r} must return an Assignment, got {type(assignment).__name__}")
    if assignment.joins.shape != keys.shape[:3]:
        raise StageError(
            f"{matching!r} must assign slots [B, H, T] = {tuple(keys.shape[:3])}, like its keys; it returned "
            f"{tuple(assignment.joins.shape)}"
        )
    if keys.shape[1] != state.heads:  # one decision for all heads
        assignment = Assignment(assignment.joins.expand(state.degree.shape).contiguous())
    check_assignment(matching, assignment.validate(), edges)
    merged = aggregate(state, assignment)
    if not isinstance(merged, KVState) or merged.slots != state.slots:
        raise StageError(f"{aggregate!r} must return a KVState of the same {state.slots} slots, got {merged!r}")
    after = compact(merge_slot_data(merged, state, assignment), assignment.stays)
    mass = torch.where(assignment.evicted, 0.0, state.degree).sum(-1)
    if not torch.allclose(after.degree.sum(-1), mass):
        raise StageError(
            f"{aggregate!r} lost or doubled tokens: the degrees of a head add up to {float(mass[0, 0]):g}, "
            f"after merging to {float(after.degree[0, 0].sum()):g}"
        )
    return after


def comparable(stages: Stages, state: KVState) -> tuple[Tensor, Tensor]:
    """Keys and masses as the stages want to see them: before or after RoPE, per head or averaged."""
    mass, similarity = stages.said.mass, stages.similarity
    weight, seen = state.degree if mass is None else state.slot_data[mass], SimilarityTraits.of(similarity)
    if seen.features is not None:
        return seen.features(state), weight
    if seen.rope == "before":
        keys = state.keys_before_rope(similarity)
    else:
        keys = state.keys.to(accumulation_dtype(state.keys.dtype))
    if seen.heads == "mean":

        def pooled(scale: float) -> Tensor:  # the heads' sum may leave the type, their mean does not
            return keys.mean(1, keepdim=True) if scale == 1 else (keys * (scale / keys.shape[1])).sum(1, keepdim=True)

        return in_hull(pooled, keys.dtype), weight.mean(1, keepdim=True)
    return keys, weight


class Reference(Backend):
    """The reference rounds as a back end: it takes everything, so any order of back ends may end with it."""

    name = "reference"

    def why_not(self, stages: Stages) -> str | None:
        return None

    def why_not_on(self, device: torch.device) -> str | None:
        return None

    def run(self, stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
        return reference_rounds(stages, state, free, sizes)


REFERENCE = Reference()
