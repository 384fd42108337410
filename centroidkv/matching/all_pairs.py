"""Greedy matching over all pairs of slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.matching.candidates import best
from centroidkv.protocols import Similarity
from centroidkv.records import Assignment, Partition


@dataclass(frozen=True)
class AllPairsMatching:
    """The most similar pair first, then the most similar pair of what is left, until ``edges`` pairs are found.

    No chunks and no sides: what bipartite soft matching approximates, at O(T^2 D) time and O(T^2) memory. The earlier
    slot of a pair joins the later one. Found without sorting all pairs: a pair that is each other's best partner is
    always among those that the greedy order takes, so all such pairs are taken at once and the search repeated
    (locally dominant edges: Preis, *Linear time 1/2-approximation for maximum weighted matching*, 1999).
    """

    needs_partition = False

    def capacity(self, length: int) -> int:
        """Half: a slot is in one pair."""
        return length // 2

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int
    ) -> Assignment:
        slots = keys.shape[2]
        index = torch.arange(slots, device=keys.device)
        pairs = similarity(keys, keys)
        # Rounding may make sim(i, j) and sim(j, i) differ; one number per pair, or "each other's best" may not exist.
        self_pairs = torch.eye(slots, dtype=torch.bool, device=keys.device)
        pairs = torch.maximum(pairs, pairs.mT).masked_fill(self_pairs, -torch.inf)
        partner = index.expand(keys.shape[:3]).clone()
        weight = torch.full_like(pairs[..., 0], -torch.inf)
        for _ in range(slots // 2):
            score, choice = pairs.max(-1)
            mutual = (choice.gather(-1, choice) == index) & (score > -torch.inf)
            if not bool(mutual.any()):
                break
            partner = torch.where(mutual, choice, partner)
            # Each pair once, at its earlier slot.
            weight = torch.where(mutual & (index < choice), score, weight)
            pairs = pairs.masked_fill(mutual[..., None] | mutual[..., None, :], -torch.inf)
        chosen = best(weight, edges) & (weight > -torch.inf)
        return Assignment(torch.where(chosen, partner, index))
