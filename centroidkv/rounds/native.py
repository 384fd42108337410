"""All rounds of a compression on the CPU by the compiled library: a head per thread at a time, in one pass each.

It equals the blocked rounds for cosine soft matching, and is several times as fast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from centroidkv.native import TYPES, Rounds, address, carried_out, library, why_not_native, why_not_these
from centroidkv.rounds.backend import Backend, OutOfReach
from centroidkv.rounds.settings import COSINE_SOFT, Settings, formulas, why_no_settings
from centroidkv.rounds.stages import Stages
from centroidkv.state import KVState


@torch.no_grad()
def native_rounds(state: KVState, free: Tensor, sizes: Sequence[int], settings: Settings) -> KVState:
    """As :func:`~centroidkv.rounds.blocked.blocked_rounds`, of cosine soft matching.

    Raises:
        OutOfReach: near the ends of float32's range, where norms cannot be squared or differences of values overflow.
        MemoryError: the library found too little memory for its work.
    """
    batch, heads, slots, size = state.keys.shape
    begin = int(free[0, 0].sum())
    steps = [before - left for before, left in pairwise((begin, *sizes)) if left < before]
    if not steps:
        return replace(state, rounds=state.rounds + len(sizes))
    keys, values = (_by_row(x) for x in (state.keys, state.values))
    final = slots - sum(steps)
    # Whatever the default type and device are: the library writes just these.
    removed = torch.tensor(steps, dtype=torch.int64, device=keys.device)
    out_keys = keys.new_empty(batch, heads, final, size)
    out_values = values.new_empty(batch, heads, final, values.shape[-1])
    degree = torch.empty(batch, heads, final, dtype=torch.float32, device=keys.device)
    origin = torch.empty(batch, heads, final, dtype=torch.int64, device=keys.device)
    numbers = Rounds(
        batch * heads, slots, final, size, values.shape[-1], min(settings.chunk, slots), len(steps),
        torch.get_num_threads(), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        settings.rank == "chunk", settings.step or 0.0,
    )  # fmt: skip
    old, movable = state.degree.contiguous(), free.contiguous()
    outcome = library().centroidkv_rounds(
        TYPES[state.keys.dtype], ctypes.byref(numbers), address(keys), address(values), address(old), address(movable),
        address(removed), address(out_keys), address(out_values), address(degree), address(origin),
    )  # fmt: skip
    if not carried_out(outcome):
        raise OutOfReach("some keys or values are too close to the ends of float32's range to be squared or subtracted")
    return replace(
        state, keys=out_keys, values=out_values, degree=degree, positions=state.positions.gather(-1, origin),
        rounds=state.rounds + len(sizes),
    )  # fmt: skip


def _by_row(x: Tensor) -> Tensor:
    """``[B, H, T, X]`` as ``[B * H, T, X]`` with unit stride in X; a copy only where strides do not allow a view."""
    rows = x.flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class Native(Backend):
    """The compiled rounds as a back end. The first question compiles the library, if need be."""

    name = "native"

    def why_not(self, stages: Stages) -> str | None:
        reason = why_no_settings(stages)
        if reason is None and formulas(stages) != COSINE_SOFT:
            reason = "it knows Cosine() with BipartiteSoftMatching() only"
        return reason or why_not_native()

    def why_not_on(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"it is for the CPU, not {device}"

    def why_not_these(self, state: KVState) -> str | None:
        if state.slot_data:
            return f"it knows no slot data, and these slots carry {sorted(state.slot_data)}"
        return why_not_these(state.keys, state.values)

    def run(self, stages: Stages, state: KVState, free: Tensor, sizes: Sequence[int]) -> KVState:
        return native_rounds(state, free, sizes, Settings.of(stages))


NATIVE = Native()
