"""K-means clustering."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.protocols import Similarity
from centroidkv.ranges import in_hull
from centroidkv.records import Assignment, Partition


@dataclass(frozen=True)
class KMeans:
    """Lloyd's algorithm with k = T - edges centroids, weighted by degree: the expensive, order-blind clustering.

    Starts from k evenly spaced keys, so it is deterministic. After the last iteration each cluster stays in the slot
    of its member most similar to the centroid. A cluster that lost all members is re-seeded with the slot that fits
    its own cluster worst, so exactly ``edges`` slots leave. Memory O(T k) per head; time O(iterations T k D).

    Args:
        iterations: number of Lloyd iterations, >= 1.

    Source: Lloyd, *Least squares quantization in PCM*, 1982.
    """

    iterations: int = 10
    needs_partition = False

    def __post_init__(self) -> None:
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise StageError(f"KMeans takes a whole number of iterations >= 1, got {self.iterations!r}")

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int
    ) -> Assignment:
        slots = keys.shape[2]
        count = slots - edges
        index = torch.arange(slots, device=keys.device)
        mass = degree[..., None].to(keys.dtype)
        seeds = torch.div(index[:count] * slots, max(count, 1), rounding_mode="floor")
        centroids = keys[:, :, seeds]
        for _ in range(self.iterations):
            cluster = similarity(keys, centroids).argmax(-1)
            wide = cluster[..., None]
            total = torch.zeros_like(mass[:, :, :count]).scatter_add(2, wide, mass)
            centroids = torch.where(total > 0, in_hull(partial(_means, keys, mass, total, wide), keys.dtype), centroids)
        score, cluster = similarity(keys, centroids).max(-1)

        # The member of highest score represents its cluster; among equals the earliest.
        top = torch.full_like(score[..., :count], -torch.inf).scatter_reduce(-1, cluster, score, "amax")
        is_top = score == top.gather(-1, cluster)
        medoid = torch.full_like(cluster[..., :count], slots).scatter_reduce(
            -1, cluster, torch.where(is_top, index, slots), "amin"
        )
        stays = index == medoid.gather(-1, cluster)
        missing = count - stays.sum(-1, keepdim=True)
        # Empty clusters become singletons of the worst-fitting slots: rank the others by how badly they fit.
        misfit = (-score).masked_fill(stays, -torch.inf)
        rank = torch.empty_like(cluster).scatter(
            -1, misfit.argsort(dim=-1, descending=True, stable=True), index.expand_as(cluster)
        )
        single = (rank < missing) & ~stays
        return Assignment(torch.where(single, index, medoid.gather(-1, cluster)))


def _means(keys: Tensor, mass: Tensor, total: Tensor, cluster: Tensor, scale: float) -> Tensor:
    """``scale`` times every cluster's weighted mean: its sum over its mass, or a sum of shares where that overflows."""
    total = total.clamp(min=torch.finfo(keys.dtype).tiny)
    parts = mass * keys if scale == 1 else mass / total.gather(2, cluster) * (keys * scale)
    sums = torch.zeros_like(keys[:, :, : total.shape[2]]).scatter_add(2, cluster.expand_as(keys), parts)
    return sums / total if scale == 1 else sums
