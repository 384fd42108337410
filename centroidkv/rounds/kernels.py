"""All rounds of a compression by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.aggregate.segments import merge_slot_data, sum_merges
from centroidkv.dense import merge_sorted
from centroidkv.kernels import LARGEST_SIZE, TYPES, why_not_triton
from centroidkv.matching.bipartite import share_out
from centroidkv.matching.candidates import Candidates, best
from centroidkv.records import Assignment
from centroidkv.rounds.backend import Backend
from centroidkv.rounds.settings import COSINE_SOFT, Settings, formulas, why_no_settings
from centroidkv.rounds.stages import Stages
from centroidkv.state import KVState, gather_slots
from centroidkv.traits import SimilarityTraits

LARGEST_FUSED_CHUNK = 256
"""Slots per chunk that one program of the fused round holds."""


@torch.no_grad()
def triton_rounds(state: KVState, free: Tensor, sizes: Sequence[int], settings: Settings) -> KVState:
    """Bring the ``free [B, H, T]`` slots of ``state`` to ``sizes`` slots, one round per size; the others stay.

    Ranking within chunks makes a round one kernel. Ranking over the sequence needs all scores before the first merge:
    one kernel matches, PyTorch ranks, one kernel merges.

    Args:
        state: live slots only; every head has the same number of free ones.
        free: bool.
        sizes: free slots after each round.
        settings: see :class:`~centroidkv.rounds.settings.Settings`; of a combination that has kernels.
    """
    order = (~free).byte().argsort(dim=-1, stable=True)
    count = int(free[0, 0].sum())
    kept, body = state.select(order[..., count:]), state.select(order[..., :count])
    for size in sizes:
        edges = body.slots - size
        if settings.rank == "chunk" and settings.chunk <= LARGEST_FUSED_CHUNK and not body.slot_data:
            body = _fused(body, edges, settings.chunk)
        else:
            body = _in_two_steps(body, edges, settings)
    return replace(merge_sorted(kept, body), rounds=state.rounds + len(sizes))


def _fused(state: KVState, edges: int, chunk: int) -> KVState:
    from centroidkv.rounds.triton import fused_round_triton

    quotas = share_out(edges, _sources_per_chunk(state.slots, chunk))
    keys, values, degree, positions = fused_round_triton(
        state.keys, state.values, state.degree, state.positions, chunk, quotas
    )
    return replace(state, keys=keys, values=values, degree=degree, positions=positions)


def _in_two_steps(state: KVState, edges: int, settings: Settings) -> KVState:
    from centroidkv.aggregate.triton import merge_triton
    from centroidkv.matching.triton import best_targets_triton

    score, target = best_targets_triton(state.keys, settings.chunk)
    chunks = _sources_per_chunk(state.slots, settings.chunk)
    source = torch.arange(0, state.slots, device=score.device)
    source = source[source % settings.chunk % 2 == 0][: score.shape[-1]]
    candidates = Candidates(state.slots, source, target, score, chunks)
    if settings.rank == "sequence":
        chosen = best(score, edges)
    else:
        parts = zip(score.split(chunks, -1), share_out(edges, chunks), strict=True)
        chosen = torch.cat([best(part, quota) for part, quota in parts], -1)
    assignment = candidates.accept(chosen)
    keys, values, degree, positions = merge_triton(
        state.keys, state.values, state.degree, state.positions, assignment.joins
    )
    return replace(
        state, keys=keys, values=values, degree=degree, positions=positions, slot_data=_slot_data(state, assignment)
    )


def _slot_data(state: KVState, assignment: Assignment) -> dict[str, Tensor]:
    """Slot data of the slots that stay."""
    if not state.slot_data:
        return {}
    left = int(assignment.stays[0, 0].sum())
    index = (~assignment.stays).byte().argsort(dim=-1, stable=True)[..., :left]
    total = replace(state, degree=state.degree + sum_merges(state.degree, assignment))
    merged = merge_slot_data(total, state, assignment).slot_data
    return {name: gather_slots(data, index) for name, data in merged.items()}


def _sources_per_chunk(slots: int, chunk: int) -> list[int]:
    """Sources of every chunk that has a target: half of it, the odd one included."""
    full, tail = divmod(slots, chunk)
    return [(chunk + 1) // 2] * full + [(tail + 1) // 2] * (tail > 1)


class Triton(Backend):
    """The kernels as a back end."""

    name = "triton"

    def why_not(self, stages: Stages) -> str | None:
        known = formulas(stages) == COSINE_SOFT and SimilarityTraits.of(stages.similarity).step is None
        return why_no_settings(stages) or (None if known else (
            "there are kernels for Cosine() with BipartiteSoftMatching() only, not for "
            f"{stages.similarity!r} with {stages.matching!r}"
        ))  # fmt: skip

    def why_not_on(self, device: torch.device) -> str | None:
        return why_not_triton(device)

    def why_not_these(self, state: KVState) -> str | None:
        keys, values = state.keys, state.values
        if keys.dtype != values.dtype:
            return f"its kernels take keys and values of one type, got {keys.dtype} and {values.dtype}"
        if keys.dtype not in TYPES:
            return f"its kernels take {', '.join(map(str, TYPES))}, got {keys.dtype}"
        sizes = (keys.shape[-1], values.shape[-1])
        if not 0 < min(sizes) <= max(sizes) <= LARGEST_SIZE:
            return f"its kernels hold rows of 1 to {LARGEST_SIZE} entries, got keys of {sizes[0]}, values of {sizes[1]}"
        return None

    def run(self, stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
        return triton_rounds(state, free, sizes, Settings.of(stages))


TRITON = Triton()
