"""How time and memory grow: chunked soft matching against all pairs and k-means.

python -m analysis complexity [--repeats 3]

Each line varies one size and fits t ~ size^exponent by least squares on logarithms. Memory is the peak of live tensor
bytes during the call, beyond its input. One head, float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from analysis.benchmarks.timing import PeakBytes
from centroidkv.cli.demo import format_table
from centroidkv.matching import AllPairsMatching, BipartiteSoftMatching, KMeans
from centroidkv.partition import Alternating
from centroidkv.records import Partition
from centroidkv.similarity import Cosine, NegativeEuclidean


@dataclass(frozen=True)
class Size:
    """Tokens, chunk size, key size, centroids."""

    n: int = 8192
    c: int = 256
    d: int = 64
    k: int = 256


def soft_matching(size: Size) -> Callable[[], Any]:
    """One round of chunked soft matching that merges a quarter."""
    keys, partition = torch.randn(1, 1, size.n, size.d), Alternating(size.c)(size.n)
    return lambda: BipartiteSoftMatching()(keys, torch.ones(1, 1, size.n), partition, Cosine(), size.n // 4)


def all_pairs(size: Size) -> Callable[[], Any]:
    """Greedy matching over all pairs that merges a quarter."""
    keys = torch.randn(1, 1, size.n, size.d)
    return lambda: AllPairsMatching()(keys, torch.ones(1, 1, size.n), Partition(size.n, ()), Cosine(), size.n // 4)


def kmeans(size: Size) -> Callable[[], Any]:
    """Ten Lloyd iterations with k centroids."""
    keys = torch.randn(1, 1, size.n, size.d)
    degree, none = torch.ones(1, 1, size.n), Partition(size.n, ())
    return lambda: KMeans(10)(keys, degree, none, NegativeEuclidean(), size.n - size.k)


# (name, function, varied size, its values, the other sizes, exponent of time by the formula)
SWEEPS = (
    ("soft matching", soft_matching, "n", (16384, 32768, 65536, 131072), Size(), 1, "n c d / 4"),
    ("soft matching", soft_matching, "c", (1024, 2048, 4096, 8192), Size(n=16384), 1, "n c d / 4"),
    ("soft matching", soft_matching, "d", (64, 128, 256, 512), Size(n=16384, c=1024), 1, "n c d / 4"),
    ("all pairs", all_pairs, "n", (512, 1024, 2048, 4096), Size(), 2, "n^2 d"),
    ("k-means", kmeans, "n", (2048, 4096, 8192, 16384), Size(), 1, "i n k d"),
    ("k-means", kmeans, "k", (128, 256, 512, 1024), Size(n=4096), 1, "i n k d"),
)


def measure(call: Callable[[], Any], repeats: int) -> tuple[float, int]:
    """Best time of ``repeats`` calls in seconds, and peak bytes."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    with PeakBytes() as counter:
        call()
    return min(times), counter.peak


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """Slope of log value against log size."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def main() -> None:
    """Run all sweeps and print fitted exponents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for name, make, variable, sizes, base, expected, formula in tqdm(SWEEPS, file=sys.stderr, leave=False):
        taken = [measure(make(Size(**{**vars(base), variable: size})), options.repeats) for size in sizes]
        times, peaks = [t for t, _ in taken], [float(p) for _, p in taken]
        rows.append(
            (
                name,
                f"{variable} = {sizes[0]} .. {sizes[-1]}",
                f"{1e3 * times[0]:.1f} .. {1e3 * times[-1]:.1f}",
                f"{exponent(sizes, times):.2f}",
                f"{expected} ({formula})",
                f"{peaks[0] / 2**20:.1f} .. {peaks[-1] / 2**20:.1f}",
                f"{exponent(sizes, peaks):.2f}",
            )
        )
    same = Size(n=4096, k=1024)
    versus = [measure(make(same), options.repeats)[0] for make in (soft_matching, all_pairs, kmeans)]
    print(f"{torch.get_num_threads()} threads, one head, float32\n")
    print(
        f"4096 tokens to 3072 (k-means: to 1024) slots: soft matching {1e3 * versus[0]:.1f} ms, all pairs "
        f"{versus[1] / versus[0]:.0f} times, k-means {versus[2] / versus[0]:.0f} times as long\n"
    )
    header = ("matcher", "varied", "ms", "time exponent", "by formula", "peak MiB", "memory exponent")
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
