"""Ragged states: stages only ever see slots that are all live.

Rows of a padded batch, or heads after a threshold, hold different numbers of live slots. Instead of teaching every
stage to ignore empty slots, a state is split into groups that have none, each group is handled on its own (so that a
padded row comes out exactly as its own unpadded run), and the results are put back together behind empty slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.state import KVState
from centroidkv.state_ops import join_rows, join_slots, per_row, widened

Transform = Callable[[KVState], KVState]


def map_dense(state: KVState, transform: Transform) -> KVState:
    """Apply ``transform`` to groups of rows without empty slots and equal ``seen``; reassemble.

    Empty slots are moved to the front, where left padding is, with degree 0, position 0 and zero keys and values.
    """
    if state.batch == 0 or state.heads == 0:
        return transform(state)
    counts = state.live.sum(-1)
    uniform = bool((counts == state.slots).all()) and bool((state.seen == state.seen[0]).all())
    if uniform:
        return transform(state)
    if not bool((counts == counts[:, :1]).all()):
        return _unflatten(map_dense(_flatten(state), transform), state)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(counts[:, 0].tolist(), state.seen.tolist(), strict=True)):
        groups.setdefault(key, []).append(row)
    parts, rows = [], []
    for (count, _), members in groups.items():
        index = torch.tensor(members, device=state.keys.device)
        parts.append(transform(last_live(state.rows(index), count)))
        rows += members
    back = torch.tensor(rows, device=state.keys.device).argsort()
    return _stack(parts).rows(back)


def map_rows(state: KVState, rows: list[int], transform: Transform) -> KVState:
    """Apply ``transform`` to some rows only; the others keep their slots. No wider than the longest row needs."""
    if len(rows) == state.batch:
        return transform(state)
    others = [row for row in range(state.batch) if row not in rows]

    def index(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=state.keys.device)

    changed, same = transform(state.rows(index(rows))), state.rows(index(others))
    width = max(int(part.live.sum(-1).max()) for part in (changed, same))
    return _stack([last_live(changed, width), last_live(same, width)]).rows(index(rows + others).argsort())


def compact(state: KVState, keep: Tensor) -> KVState:
    """Drop the slots that are not in ``keep [B, H, T]``; heads that keep fewer start with empty slots."""
    counts = keep.sum(-1)
    width = int(counts.max()) if counts.numel() else 0
    kept = replace(state, degree=torch.where(keep, state.degree, torch.zeros_like(state.degree)))
    return last_live(kept, width)


def last_live(state: KVState, width: int) -> KVState:
    """The live slots of every head in order, behind as many empty ones as fill up ``width``."""
    if width > state.slots:
        return widened(_blank(state), width)
    order = state.live.byte().argsort(dim=-1, stable=True)
    return _blank(state.select(order[..., state.slots - width :]))


def merge_sorted(a: KVState, b: KVState) -> KVState:
    """Both states' slots in order of position, empty ones first."""
    joined = join_slots([a, b])
    order = torch.where(joined.live, joined.positions, -1).argsort(dim=-1, stable=True)
    return joined.select(order)


def _blank(state: KVState) -> KVState:
    """Zero whatever empty slots still hold, so that equal states are equal tensors and nothing stale is read."""
    live = state.live
    if bool(live.all()):
        return state
    wide = live[..., None]
    return replace(
        state,
        keys=state.keys.masked_fill(~wide, 0),
        values=state.values.masked_fill(~wide, 0),
        positions=state.positions.masked_fill(~live, 0),
    )


def _stack(parts: list[KVState]) -> KVState:
    width = max(part.slots for part in parts)
    return join_rows([widened(part, width) for part in parts])


def _flatten(state: KVState) -> KVState:
    """Every (row, head) a row of its own: [B, H, ...] -> [B * H, 1, ...]."""

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(1)

    return per_row(state, flat, seen=state.seen.repeat_interleave(state.heads))


def _unflatten(state: KVState, like: KVState) -> KVState:
    def back(x: Tensor) -> Tensor:
        return x.squeeze(1).unflatten(0, (like.batch, like.heads))

    if state.heads != 1:
        raise StageError("a transform of single heads returned several")
    return per_row(state, back, seen=like.seen)
