"""Independent pieces of work on the threads that PyTorch may use, one piece per thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import set_num_threads  # bound now: engines may replace torch's by one that refuses, for their own threads


def in_parallel(work: Callable[[int], None], items: Sequence[int]) -> None:
    """``work(item)`` for every item, on up to ``torch.get_num_threads()`` threads; the first error is raised.

    Operations on blocks that fit a cache are too short to be split over threads: they would mostly wait for each other.
    So pieces run side by side instead, and every operation within a piece on one thread.
    """
    before = torch.get_num_threads()
    threads = min(before, max(len(items), 1))

    inference = torch.is_inference_mode_enabled()  # known to this thread only, as is the number of threads

    def alone(share: int) -> None:
        set_num_threads(1)  # holds for the thread that calls it
        with torch.inference_mode(inference), torch.no_grad():  # leaving inference mode brings gradients back
            for item in items[share::threads]:
                work(item)

    try:
        if threads < 2:
            alone(0)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(alone, range(threads)):
                pass
    finally:
        set_num_threads(before)  # of this thread, and the default of threads begun later
