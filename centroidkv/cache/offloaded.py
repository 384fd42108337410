"""Compressed states in the processor's memory, brought to the accelerator when they are needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from centroidkv.cache.storage import Exact, Held, Storage, as_storage
from centroidkv.errors import StageError
from centroidkv.state import KVState


@dataclass(frozen=True)
class Offloaded(Storage):
    """Keeps what ``inside`` holds in pinned CPU memory; while one layer attends, the next one's is on its way.

    The accelerator then holds the compressed part of two layers, and every layer's tokens since its last event. On a
    CPU nothing is copied. Not run on a GPU yet: the CUDA lines follow the documentation and were only read.

    Args:
        inside: what is moved: ``Offloaded(Quantised(bits=4))`` moves codes and dequantises on the accelerator.

    >>> state = KVState.from_kv(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> held = Offloaded().put(state)
    >>> held.tensors["keys"].device.type, bool(Offloaded().get(held, state.keys.device).keys.equal(state.keys))
    ('cpu', True)
    """

    inside: Storage = field(default_factory=Exact)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "inside", as_storage(self.inside))
        except StageError:
            raise StageError(
                f"Offloaded(inside) takes a storage, such as Quantised(bits=8), got {self.inside!r}"
            ) from None

    @property
    def form(self) -> str:
        return self.inside.form

    def put(self, state: KVState) -> Held:
        return self.rest(self.inside.put(state), state.keys.device)

    def rest(self, held: Held, device: torch.device) -> Held:
        if device.type == "cpu":
            return held
        return held.map(_pinned if device.type == "cuda" else Tensor.cpu)

    def fetch(self, held: Held, device: torch.device) -> Held:
        if device.type == "cpu" or held.ready is not None:
            return held
        if device.type != "cuda":
            return held.map(lambda tensor: tensor.to(device))
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            near = held.map(lambda tensor: tensor.to(device, non_blocking=True))
            return replace(near, ready=stream.record_event())

    def get(self, held: Held, device: torch.device) -> KVState:
        near = self.fetch(held, device)
        if near.ready is not None:
            reader = torch.cuda.current_stream(device)
            reader.wait_event(near.ready)
            for tensor in near.tensors.values():
                tensor.record_stream(reader)  # allocated on the copying stream: not to be reused before it was read
        return self.inside.get(near, device)


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in page-locked memory, complete when this returns: events are rare enough to wait."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
