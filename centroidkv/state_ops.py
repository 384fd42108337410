"""Putting states together and taking them apart: every field of a KVState, in one place.

Caches, dense groups and storages call these, so whatever a state carries travels wherever slots and rows do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.state import SLOTS, KVState

DATA = "slot_data."
"""What comes before the names of the others."""


def tensors_of(state: KVState) -> dict[str, Tensor]:
    """Every tensor ``[B, H, T, ...]`` of a state, by name; slot data as ``"slot_data.NAME"``."""
    data = {f"{DATA}{name}": tensor for name, tensor in state.slot_data.items()}
    return {name: getattr(state, name) for name in SLOTS} | data


def with_tensors(state: KVState, tensors: Mapping[str, Tensor], **others: Any) -> KVState:
    """``state`` with other tensors of the names that :func:`tensors_of` gives; ``others`` replace other fields."""
    data = {name.removeprefix(DATA): tensor for name, tensor in tensors.items() if name.startswith(DATA)}
    fields: dict[str, Any] = {name: tensors[name] for name in SLOTS}
    return replace(state, **fields, slot_data=data, **others)


def fill_of(state: KVState, name: str) -> float:
    """What empty slots hold in the tensor ``name``, and new ones in slot data that nobody told about them."""
    return state.rule(name.removeprefix(DATA)).fill if name.startswith(DATA) else 0.0


def completed(state: KVState, like: KVState) -> KVState:
    """``state`` with the slot data that ``like`` has and it has not, filled as their rules say."""
    missing = [name for name in like.slot_data if name not in state.slot_data]
    if not missing:
        return state
    shape, data = state.degree.shape, dict(state.slot_data)
    for name in missing:
        model = like.slot_data[name]
        data[name] = model.new_full((*shape, *model.shape[3:]), like.rule(name).fill)
    rules = {name: like.slot_rules[name] for name in missing if name in like.slot_rules}
    return replace(state, slot_data=data, slot_rules={**state.slot_rules, **rules})


def join_slots(states: Sequence[KVState]) -> KVState:
    """Slots behind slots. What belongs to rows and heads (``seen``, head data) is the first one's."""
    return _join(states, 2)


def join_rows(states: Sequence[KVState]) -> KVState:
    """Rows below rows, all of as many slots."""
    return _join(states, 0)


def _join(states: Sequence[KVState], axis: int) -> KVState:
    first = states[0]
    if len(states) == 1:
        return first
    for other in states[1:]:
        first = completed(first, other)
    parts = [first, *(completed(other, first) for other in states[1:])]
    named = [tensors_of(part) for part in parts]
    joined = {name: torch.cat([tensors[name] for tensors in named], axis) for name in named[0]}
    others: dict[str, Any] = {"rounds": max(part.rounds for part in parts)}
    if axis == 0:
        others["seen"] = torch.cat([part.seen for part in parts])
        others["head_data"] = {name: torch.cat([p.head_data[name] for p in parts]) for name in first.head_data}
    return with_tensors(first, joined, **others)


def widened(state: KVState, slots: int) -> KVState:
    """With as many empty slots in front as make up ``slots``."""
    extra = slots - state.slots
    if extra == 0:
        return state

    def widen(name: str, x: Tensor) -> Tensor:
        return torch.cat((x.new_full((*x.shape[:2], extra, *x.shape[3:]), fill_of(state, name)), x), 2)

    return with_tensors(state, {name: widen(name, x) for name, x in tensors_of(state).items()})


def columns(state: KVState, some: slice) -> KVState:
    """Some slots of all rows and heads; views."""
    return state.map_slots(lambda x: x[:, :, some])


def row(state: KVState, number: int) -> KVState:
    """One row; views."""
    return per_row(state, lambda x: x[number : number + 1])


def per_row(state: KVState, change: Callable[[Tensor], Tensor], **others: Any) -> KVState:
    """``change`` applied to every tensor whose first axis is rows, ``seen`` and head data among them."""
    others.setdefault("head_data", {name: change(data) for name, data in state.head_data.items()})
    if "seen" not in others:
        others["seen"] = change(state.seen)
    return state.map_slots(change, **others)
