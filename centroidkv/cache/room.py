"""Room to grow: buffers with spare slots, so that a new token is written instead of the whole cache copied."""

from __future__ import annotations

import torch
from torch import Tensor

from centroidkv.state import KVState
from centroidkv.state_ops import completed, tensors_of, with_tensors

SPARE = 16
"""Slots to spare when buffers are made: the cache is copied once in so many tokens instead of at every one. More would
show in small caches' bytes, and less be gained."""


class Room:
    """Buffers behind a growing state, whose tensors are views of their fronts.

    Only slots behind the state are ever written, so a state handed out earlier never changes. One room serves one state
    at a time: a state that came from elsewhere (compressed, reordered, cropped) is copied into new buffers first.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def extend(self, state: KVState, new: KVState) -> KVState:
        """``state`` with the slots of ``new`` behind it; its tensors are views, valid until the state is replaced.

        Args:
            state: any.
            new: as many rows and heads, the same types; slot data that it lacks is filled as its rule says. The result
                is rotated as it is.
        """
        state, new = completed(state, new), completed(new, state)
        length = state.slots + new.slots
        if not self._holds(state, length):
            self._buffers = {name: _roomy(tensor, length + SPARE) for name, tensor in tensors_of(state).items()}
        for name, tensor in tensors_of(new).items():
            self._buffers[name].narrow(2, state.slots, new.slots).copy_(tensor)
        views = {name: buffer.narrow(2, 0, length) for name, buffer in self._buffers.items()}
        return with_tensors(state, views, seen=state.seen + new.seen, rotary=new.rotary)

    def nbytes_behind(self, state: KVState) -> int:
        """Bytes of the spare slots behind ``state``; 0 for a state that is not in these buffers."""
        if not self._holds(state, state.slots):
            return 0
        return sum(x.numel() * x.element_size() for x in self._buffers.values()) - state.nbytes

    def _holds(self, state: KVState, length: int) -> bool:
        """Whether ``state`` is the front of these buffers, and ``length`` slots fit."""
        mine, keys = tensors_of(state), self._buffers.get("keys")
        return (
            keys is not None
            and keys.shape[2] >= length
            and mine.keys() == self._buffers.keys()
            and all(
                tensor.data_ptr() == self._buffers[name].data_ptr()
                and tensor.stride() == self._buffers[name].stride()
                and tensor.shape[:2] == self._buffers[name].shape[:2]
                for name, tensor in mine.items()
            )
        )


def _roomy(x: Tensor, slots: int) -> Tensor:
    with torch.inference_mode(False):  # a buffer made in inference mode could not be written to outside of it
        buffer = x.new_empty(*x.shape[:2], slots, *x.shape[3:])
    buffer[:, :, : x.shape[2]] = x
    return buffer
