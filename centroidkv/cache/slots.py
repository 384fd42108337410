"""The buffers of a layer of constant size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.state import SLOTS, KVState
from centroidkv.state_ops import fill_of, tensors_of


@dataclass(frozen=True, eq=False)
class Slots:
    """The buffers of one layer, C slots wide. Written in place only: a compiled graph knows them by their addresses.

    Args:
        keys, values: ``[B, H, C, D]``, ``[B, H, C, Dv]``; empty slots hold finite numbers.
        degree: ``[B, H, C]`` float32, 0 for empty slots, so that attention over all C slots gives them weight 0.
        positions: ``[B, H, C]`` int32.
        seen: ``[B]`` int64, real tokens per row.
        cursor: ``[1]`` int64, the slot the next token goes to: all slots before it are taken.
        tokens: ``[]`` int64, columns seen, padding included: what position ids count.
        data: slot data ``[B, H, C, ...]``; slots not in use hold what their rule fills in, and so does a new token's.
    """

    keys: Tensor
    values: Tensor
    degree: Tensor
    positions: Tensor
    seen: Tensor
    cursor: Tensor
    tokens: Tensor
    data: dict[str, Tensor]

    @classmethod
    @torch.inference_mode(False)  # buffers made in inference mode could not be written to outside of it
    def for_state(cls, state: KVState, capacity: int) -> Slots:
        """Empty buffers for states like ``state``."""

        def empty(name: str, x: Tensor) -> Tensor:
            return x.new_full((*x.shape[:2], capacity, *x.shape[3:]), fill_of(state, name))

        buffers = {name: empty(name, x) for name, x in tensors_of(state).items()}
        count = torch.zeros(1, dtype=torch.long, device=state.keys.device)
        slots = cls(
            **{name: buffers.pop(name) for name in SLOTS},
            seen=torch.zeros_like(state.seen),
            cursor=count,
            tokens=count[0].clone(),
            data=buffers,
        )
        for tensor in slots.tensors:  # CUDA graphs may then read and write them where they are
            torch._dynamo.mark_static_address(tensor)
        return slots

    @property
    def by_slot(self) -> dict[str, Tensor]:
        """Those with an axis of slots, by the names of :func:`~centroidkv.state_ops.tensors_of`."""
        return {name: getattr(self, name) for name in SLOTS} | self.data

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self.by_slot.values(), self.seen, self.cursor, self.tokens]

    def fits(self, state: KVState) -> bool:
        """Whether ``state`` has as many rows and heads, the same types and device, and the same slot data."""
        mine, theirs = self.by_slot, tensors_of(state)
        return mine.keys() == theirs.keys() and all(
            (x.shape[:2], x.shape[3:], x.dtype, x.device) == (y.shape[:2], y.shape[3:], y.dtype, y.device)
            for x, y in zip(mine.values(), (theirs[name] for name in mine), strict=True)
        )
