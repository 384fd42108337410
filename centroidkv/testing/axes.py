"""Axes taken apart: what belongs to one row and head does not move when another one is changed, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.state import KVState
from centroidkv.testing.law import expect_same


def expect_rows_and_heads_apart(
    decide: Callable[[KVState], tuple[Tensor, ...]], state: KVState, other: KVState, what: str, *, pools: bool = False
) -> None:
    """Within a law: ``decide`` gives tensors ``[B, H, ...]`` whose entries depend on their own row and head alone.

    Exact: shapes stay what they are, so that rounding stays too. For the first, a middle and the last row and head:
    nobody else moves when it gets the content of ``other``, and it stays when all others do. ``pools``: heads of a row
    may look at each other, rows may not.
    """
    batch, heads = state.batch, state.heads
    if batch * heads == 0:
        return
    base = decide(state)
    places = {(0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1), (0, heads - 1)}
    for row, head in sorted(places):
        mine = torch.zeros(batch, heads, dtype=torch.bool)
        if pools:
            mine[row] = True
        else:
            mine[row, head] = True
        name = f"row {row}" if pools else f"row {row}, head {head}"
        for changed, still, text in (
            (mine, ~mine, f"{what} of all others when {name} is changed"),
            (~mine, mine, f"{what} of {name} when all others are changed"),
        ):
            for before, after in zip(base, decide(mixed(state, other, changed)), strict=True):
                expect_same(after[still], before[still], text)


def mixed(state: KVState, other: KVState, changed: Tensor) -> KVState:
    """``state`` with the contents of ``other`` in the rows and heads ``changed [B, H]``; places stay."""

    def mix(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(changed.reshape(*changed.shape, *(1,) * (x.ndim - 2)), y, x)

    degree = mix(state.degree, state.degree.flip(-1)) if bool(state.live.all()) else state.degree
    return replace(
        state,
        keys=mix(state.keys, other.keys),
        values=mix(state.values, other.values),
        degree=degree,
        slot_data={name: mix(data, other.slot_data.get(name, data)) for name, data in state.slot_data.items()},
        head_data={name: mix(data, other.head_data.get(name, data)) for name, data in state.head_data.items()},
    )
