"""Candidate edges: every source with its best target. The shared first half of the bipartite matchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.protocols import Similarity
from centroidkv.records import Assignment, Partition


@dataclass(frozen=True, eq=False)
class Candidates:
    """One edge per source, in slot order within each block.

    ``source [S]``, ``target [B, H, S]`` and ``score [B, H, S]``; ``slots`` is T. ``chunk_sizes`` counts the sources of
    each chunk, in order.
    """

    slots: int
    source: Tensor
    target: Tensor
    score: Tensor
    chunk_sizes: list[int]

    def accept(self, chosen: Tensor) -> Assignment:
        """The assignment that carries out the edges marked in ``chosen [B, H, S]``."""
        joins = torch.arange(self.slots, device=chosen.device).expand(*chosen.shape[:2], self.slots).clone()
        source = self.source.expand_as(self.target)
        return Assignment(joins.scatter(-1, source, torch.where(chosen, self.target, source)))


def best_targets(
    keys: Tensor,
    partition: Partition,
    similarity: Similarity,
    mass: Tensor | None = None,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Candidates:
    """b*(a) = argmax_b sim(k_a, k_b) over the targets b of a's chunk; ties go to the earliest target.

    With ``weigh``, of ``weigh(sim, mass_a, mass_b)`` instead.
    """
    batch, heads, slots, _ = keys.shape
    partition = partition.to(keys.device)
    source, target, score, sizes = [], [], [], []
    for block in partition.blocks:
        if not block.targets.shape[1] or not block.sources.shape[1]:
            continue  # sources without a target, or targets without a source: all of them stay
        pairs = similarity(keys[:, :, block.sources], keys[:, :, block.targets])
        wanted = (batch, heads, *block.sources.shape, block.targets.shape[1])
        if not isinstance(pairs, Tensor) or tuple(pairs.shape) != wanted:
            got = tuple(pairs.shape) if isinstance(pairs, Tensor) else type(pairs).__name__
            raise StageError(f"{similarity!r} must score all pairs, {wanted}, it returned {got}")
        if weigh is not None and mass is not None:
            pairs = weigh(pairs, mass[:, :, block.sources], mass[:, :, block.targets])
        best, which = pairs.max(-1)
        if bool(best.isnan().any()):
            raise StageError(f"{similarity!r} returned NaN; a source would join an arbitrary target")
        target.append(block.targets.expand(batch, heads, -1, -1).gather(-1, which).flatten(2))
        score.append(best.flatten(2))
        source.append(block.sources.flatten())
        sizes += [block.sources.shape[1]] * block.sources.shape[0]
    if not source:
        empty = keys.new_empty(batch, heads, 0)
        return Candidates(slots, empty.new_empty(0, dtype=torch.long), empty.long(), empty, [])
    return Candidates(slots, torch.cat(source), torch.cat(target, -1), torch.cat(score, -1), sizes)


def best(score: Tensor, count: int) -> Tensor:
    """Mark the ``count`` largest entries along the last axis; ties go to the earliest (topk would not say)."""
    order = score.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, order, True)
