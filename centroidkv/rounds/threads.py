"""Independent pieces of work on the threads that PyTorch may use, one piece per thread at a time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib", "libiomp5md.dll")
"""In PyTorch's own folder, what leads to the OpenMP it runs on: on Linux and macOS PyTorch itself, which needs it."""


def in_parallel(work: Callable[[int], None], items: Sequence[int]) -> None:
    """``work(item)`` for every item, on up to ``torch.get_num_threads()`` threads; the first error is raised.

    Operations on blocks that fit a cache are too short to be split over threads: they would mostly wait for each other.
    So pieces run side by side instead, and every operation within a piece on one thread. That limit is set on threads
    begun for this call (for a single piece on the calling one, which gets back what it had), and on no other:
    ``torch.set_num_threads`` would change, for the time of the call, what every thread begun meanwhile is given for
    good. Where it cannot be set like that (:func:`why_not_alone`), pieces run one after the other, each on all
    threads: slower, and nothing is changed either.

    After an error, or an interrupt while this waits, no further piece is begun, and those begun are waited for.
    """
    # PyTorch sets a thread up when it is first asked, which would undo a limit set before.
    threads = torch.get_num_threads()
    if not items:
        return
    if threads == 1 or why_not_alone() is not None:
        _work_off(work, items)
        return
    limits = _limits()
    assert isinstance(limits, _Limits)
    if len(items) == 1:  # a thread of its own would cost a small input a third of its time
        limits.here(lambda: _work_off(work, items))
        return
    threads = min(threads, len(items))
    inference = torch.is_inference_mode_enabled()  # known to this thread only
    stop = threading.Event()

    def share(first: int) -> None:
        limits.one_thread()
        with torch.inference_mode(inference):
            _work_off(work, items[first::threads], stop)

    with ThreadPoolExecutor(threads) as pool:  # leaving it waits for what was begun
        try:
            shares = [pool.submit(share, first) for first in range(threads)]
            wait(shares, return_when=FIRST_EXCEPTION)
            for one in shares:
                if one.done():
                    one.result()
        finally:
            stop.set()


def _work_off(work: Callable[[int], None], items: Sequence[int], stop: threading.Event | None = None) -> None:
    with torch.no_grad():  # leaving inference mode brings gradients back
        for item in items:
            if stop is not None and stop.is_set():
                return
            work(item)


def why_not_alone() -> str | None:
    """Why a thread's operations cannot be limited to that thread without touching others; None if they can."""
    limits = _limits()
    return limits if isinstance(limits, str) else None


@dataclass(frozen=True)
class _Limits:
    """What limits the thread that calls it, and no other."""

    openmp: Callable[[int], Any]
    mkl: Callable[[int], Any] | None

    def one_thread(self) -> None:
        """One thread for the operations of the calling thread, as long as it lives."""
        torch.get_num_threads()
        self.openmp(1)
        if self.mkl is not None:
            self.mkl(1)

    def here(self, work: Callable[[], None]) -> None:
        """``work()`` on the calling thread, whose operations have one thread until then."""
        own, own_mkl = torch.get_num_threads(), 0  # 0: what holds for the process

        def restore() -> None:
            self.openmp(own)
            if self.mkl is not None:
                self.mkl(own_mkl)

        try:
            try:
                self.openmp(1)
                if self.mkl is not None:
                    own_mkl = self.mkl(1)
                work()
            finally:
                restore()
        finally:
            restore()  # once more, for an interrupt that came in the midst of the first


@cache
def _limits() -> _Limits | str:
    """How to limit a thread, or why that cannot be done.

    OpenMP keeps the number of threads per calling thread. Which OpenMP PyTorch runs on is not only what it was built
    with (another may have been loaded before it), so the candidates are tried, on a thread that ends with the trial.
    MKL obeys OpenMP only until ``torch.set_num_threads`` is called once; from then on it has its own numbers.
    """
    loaded = list(_loaded())
    openmp = next(
        (found for lib in loaded if (found := _function(lib, "omp_set_num_threads")) and _obeyed(found)), None
    )
    if openmp is None:
        return "PyTorch does not run on an OpenMP that can be found here"
    mkl = next((found for lib in loaded if (found := _function(lib, "MKL_Set_Num_Threads_Local"))), None)
    if mkl is None and torch.backends.mkl.is_available():
        return "PyTorch computes with an MKL that cannot be found here"
    return _Limits(openmp, mkl)


def _loaded() -> list[ctypes.CDLL]:
    """Libraries of this process that may know OpenMP: the process itself, as far as all see it, and PyTorch's."""
    places: list[str | None] = [None]
    places += [str(path) for name in LIBRARIES if (path := Path(torch.__file__).parent / "lib" / name).exists()]
    found = []
    for place in places:
        try:
            found.append(ctypes.CDLL(place))
        except (OSError, TypeError):  # TypeError: Windows has no library of everything
            continue
    return found


def _function(library: ctypes.CDLL, name: str) -> Callable[[int], Any] | None:
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = [ctypes.c_int]
    return function


def _obeyed(openmp: Callable[[int], Any]) -> bool:
    """Whether PyTorch goes by what ``openmp`` sets."""
    seen: list[int] = []

    def trial() -> None:
        torch.get_num_threads()
        for count in (3, 1):
            openmp(count)
            seen.append(torch.get_num_threads())

    thread = threading.Thread(target=trial)
    thread.start()
    thread.join()
    return seen == [3, 1]
