"""Time and memory of calls: what the benchmarks share."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Key = TypeVar("Key")


def synchronize(device: torch.device | str) -> None:
    """Wait for the device, so that a clock read next means something."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


FLUSHED = {"cpu": 2**25, "cuda": 2**28}
"""Bytes written between calls: more than a core's second level cache, more than a GPU's."""


def seconds(
    calls: dict[Key, Callable[[], Any]], repeats: int, device: torch.device | str = "cpu", flush: bool = False
) -> dict[Key, float]:
    """The median time of each call over ``repeats`` passes, the calls taking turns, after one pass to warm up.

    Turns spread whatever else the machine does over all calls, so ratios of the results hold on a busy machine too.
    With ``flush`` the device's own caches hold something else before each call, as they would inside a model.
    """
    taken: dict[Key, list[float]] = {name: [] for name in calls}
    other = torch.empty(FLUSHED[torch.device(device).type] if flush else 0, dtype=torch.uint8, device=device)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            other.fill_(1)
            spent = _once(call, device)
            if turn:
                taken[name].append(spent)
    return {name: statistics.median(times) for name, times in taken.items()}


def _once(call: Callable[[], Any], device: torch.device | str) -> float:
    if torch.device(device).type == "cuda":
        # Events leave out what the CPU needs before the device begins.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


class PeakBytes(TorchDispatchMode):
    """Counts bytes of tensor storages that are alive, and remembers the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in before and key not in self._known:
                    self._known.add(key)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._release, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
