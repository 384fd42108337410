"""Other ways to cluster at the same budget: what the paper's method is held against.

All set the same slots aside as ``presets.centroidkv`` and average by degree; they differ in who merges with whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from centroidkv import Budget, Compressor, KVState, presets
from centroidkv.matching import AllPairsMatching
from centroidkv.queries import expected_attention
from centroidkv.records import Assignment, Partition
from centroidkv.schedule import Constant, FewestRounds

ATTENDED = "attended"


@dataclass(frozen=True)
class MergeAfterEviction:
    """The ``edges`` slots that queries are expected to attend to least each join the most similar slot that stays.

    Survivors are chosen first and the rest is merged into them, whatever the distance: the scheme of *D2O*,
    arXiv 2406.13035, without its threshold. One round, over the whole sequence.
    """

    needs_partition = False
    needs_queries = True
    mass = ATTENDED

    def capacity(self, length: int) -> int:
        """All but one slot."""
        return length - 1

    def prepare(self, state: KVState, free: Tensor) -> KVState:
        """Add the expected attention of every slot."""
        return replace(state, slot_data={**state.slot_data, ATTENDED: expected_attention(state, self)})

    def __call__(self, keys: Tensor, mass: Tensor, partition: Partition, similarity: Any, edges: int) -> Assignment:
        order = mass.argsort(dim=-1, stable=True)
        gone, stays = order[..., :edges], order[..., edges:].sort(-1).values

        def at(index: Tensor) -> Tensor:
            return keys.gather(2, index[..., None].expand(*index.shape, keys.shape[-1]))

        nearest = similarity(at(gone), at(stays)).argmax(-1)
        joins = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3]).clone()
        return Assignment(joins.scatter(-1, gone, stays.gather(-1, nearest)))


@dataclass(frozen=True)
class AtRandom:
    """A score that has nothing to do with the keys; the same for the same shapes."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        generator = torch.Generator(a.device).manual_seed(a.shape[-2] * b.shape[-2])
        shape = (*a.shape[:-1], b.shape[-2])
        return torch.rand(shape, generator=generator, device=a.device, dtype=a.dtype)


def like_the_paper(budget: Budget, **parts: Any) -> Compressor:
    """The paper's preset with other parts."""
    return presets.centroidkv(budget).with_(**parts)


CLUSTERINGS: dict[str, Callable[[Budget], Compressor]] = {
    # Larger steps: a round of it takes seconds per layer, and small ones would need thirty.
    "all pairs": lambda budget: like_the_paper(budget, matching=AllPairsMatching(), schedule=Constant(0.25)),
    "random pairs": lambda budget: like_the_paper(budget, similarity=AtRandom()),
    "merge after eviction": lambda budget: like_the_paper(
        budget, matching=MergeAfterEviction(), schedule=FewestRounds()
    ),
}
"""By name; k-means is a preset."""
