"""The buffers of a layer of constant size."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from centroidkv.state import KVState


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
    """

    keys: Tensor
    values: Tensor
    degree: Tensor
    positions: Tensor
    seen: Tensor
    cursor: Tensor
    tokens: Tensor

    @classmethod
    @torch.inference_mode(False)  # buffers made in inference mode could not be written to outside of it
    def for_state(cls, state: KVState, capacity: int) -> Slots:
        """Empty buffers for states like ``state``."""

        def empty(x: Tensor) -> Tensor:
            return x.new_zeros(*x.shape[:2], capacity, *x.shape[3:])

        count = torch.zeros(1, dtype=torch.long, device=state.keys.device)
        slots = cls(
            keys=empty(state.keys),
            values=empty(state.values),
            degree=empty(state.degree),
            positions=empty(state.positions),
            seen=torch.zeros_like(state.seen),
            cursor=count,
            tokens=count[0].clone(),
        )
        for tensor in slots.tensors:  # CUDA graphs may then read and write them where they are
            torch._dynamo.mark_static_address(tensor)
        return slots

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [getattr(self, field.name) for field in fields(self)]

    def fits(self, state: KVState) -> bool:
        """Whether ``state`` has as many rows and heads, and the same types and device."""
        return all(
            (mine.shape[:2], mine.shape[3:], mine.dtype, mine.device) == (x.shape[:2], x.shape[3:], x.dtype, x.device)
            for mine, x in ((self.keys, state.keys), (self.values, state.values), (self.positions, state.positions))
        )
