"""Bipartite matching by Ward's criterion: what a merge costs, not only how alike its two slots are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.matching.candidates import best, best_targets
from centroidkv.protocols import Similarity
from centroidkv.queries import expected_attention
from centroidkv.records import Assignment, Partition
from centroidkv.scores import passages
from centroidkv.slot_data import SlotDatum
from centroidkv.state import KVState

IMPORTANCE = "importance"
"""The slot data that says what a slot weighs."""
ADDED_UP = SlotDatum("sum")


@dataclass(frozen=True)
class WardMatching:
    """Each source proposes the target that costs least to merge with; the ``edges`` cheapest proposals are carried out.

    cost(a, b) = w_a w_b / (w_a + w_b) * -sim(a, b): with a squared distance as similarity, the growth of the weighted
    sum of squares (Ward's linkage), so heavy slots are left alone and light ones give way. Exactly ``edges`` slots
    leave; ties go to the earliest source.

    Args:
        weight: "importance": w = a / mean(a) + floor + passage * p / mean(p): a is a slot's expected attention, p its
            passage score squared where above average, means are over the slots that may merge; computed once per
            compression, and added up when slots merge. "degree": w = N, the classic criterion, needs no queries.
        floor: weight that every slot has.
        passage: weight of distinctive passages (:func:`centroidkv.scores.passages`): exact strings or running text.

    Source: Ward, *Hierarchical Grouping to Optimize an Objective Function* (1963); the weights are ours.
    """

    formula: ClassVar[str] = "ward"
    weight: str = "importance"
    floor: float = 0.1
    passage: float = 0.0

    def __post_init__(self) -> None:
        if self.weight not in ("importance", "degree"):
            raise StageError(f"weight is 'importance' or 'degree', got {self.weight!r}")
        if not self.floor > 0 or not self.passage >= 0:
            raise StageError(f"WardMatching takes a floor > 0 and a passage weight >= 0, got {self!r}")

    @property
    def needs_queries(self) -> bool:
        """Whether states must carry queries."""
        return self.weight == IMPORTANCE

    @property
    def pools_heads(self) -> bool:
        """Whether a head's merges depend on the keys of the other heads."""
        return self.weight == IMPORTANCE and self.passage > 0

    @property
    def mass(self) -> str | None:
        """The slot data it wants in place of degrees."""
        return IMPORTANCE if self.weight == IMPORTANCE else None

    def prepare(self, state: KVState, free: Tensor) -> KVState:
        """Add every slot's importance, once per compression; keep what the caller set."""
        if self.weight != IMPORTANCE:
            return state
        if IMPORTANCE in state.slot_data:
            return state.with_slot_data(IMPORTANCE, state.slot_data[IMPORTANCE], ADDED_UP)
        importance = _over_mean(expected_attention(state, self), free) + self.floor
        if self.passage:
            standing_out = passages(state.before_rope(self)).clamp(min=0).square()
            importance = importance + self.passage * _over_mean(standing_out, free)
        return state.with_slot_data(IMPORTANCE, importance, ADDED_UP)

    def weigh(self, scores: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Minus the cost of every pair: ``scores [..., m, n]``, weights ``source [..., m]`` and ``target [..., n]``."""
        a, b = source[..., :, None].to(scores.dtype), target[..., None, :].to(scores.dtype)
        return scores * (a * b / (a + b).clamp(min=torch.finfo(torch.float32).tiny))

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int
    ) -> Assignment:
        candidates = best_targets(keys, partition, similarity, degree, self.weigh)
        return candidates.accept(best(candidates.score, edges))


def _over_mean(x: Tensor, free: Tensor) -> Tensor:
    """``x`` in units of its mean over the free slots of its row."""
    mean = (x * free).sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp(min=1)
    return x / mean.clamp(min=torch.finfo(torch.float32).tiny)
