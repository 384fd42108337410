"""Compressors and storages from a few words, so that a case prints in one line. Copied into failing scripts."""

from __future__ import annotations

from typing import Any

from centroidkv import Compressor, presets
from centroidkv.cache import Offloaded, Quantised
from centroidkv.matching import AllPairsMatching, BipartiteSoftMatching, Evict, KMeans
from centroidkv.partition import Alternating, Halves, RandomSplit, Strided
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.schedule import Constant, FewestRounds, LinearAnnealing
from centroidkv.similarity import Cosine, Dot, NegativeEuclidean

SIMILARITIES = {
    "cosine": Cosine, "dot": Dot, "euclidean": NegativeEuclidean,
    "mean": lambda: Cosine(heads="mean"), "before": lambda: Cosine(rope="before"),
}  # fmt: skip
MATCHINGS = {
    "bipartite": BipartiteSoftMatching, "sequence": lambda: BipartiteSoftMatching(rank="sequence"),
    "all pairs": AllPairsMatching, "kmeans": lambda: KMeans(iterations=2), "evict": Evict,
}  # fmt: skip
SPLITS = {"alternating": Alternating, "halves": Halves, "strided": Strided, "random": RandomSplit}
SCHEDULES = {"annealing": LinearAnnealing, "fewest": FewestRounds, "constant": lambda: Constant(0.3)}
STORAGES: dict[Any, Any] = {
    None: lambda: None, "8 bits": lambda: Quantised(bits=8, group=8), "4 bits": lambda: Quantised(bits=4, group=8),
    "offloaded": Offloaded, "offloaded 8 bits": lambda: Offloaded(Quantised(bits=8, group=8)),
}  # fmt: skip


def make_compressor(
    preset: str | None = None, budget: float | int = 0.4, sinks: int = 1, recent: int = 4, chunk: int | None = 16,
    split: str = "alternating", similarity: str = "cosine", matching: str = "bipartite", schedule: str = "annealing",
    distinctive: str | None = None, backend: str = "auto",
) -> Compressor:  # fmt: skip
    """A preset of that name with that budget, or one put together from the other options."""
    if preset is not None:
        return presets.ALL[preset](budget)
    keep: list[Any] = [Sinks(sinks), Recent(recent)]
    if distinctive is not None:
        keep.append(Distinctive(score=distinctive, share=0.3, rope="after" if distinctive == "low_norm" else "before"))
    return (
        Compressor.builder()
        .preserve(*keep)
        .partition(SPLITS[split](chunk_size=chunk))
        .similarity(SIMILARITIES[similarity]())
        .matching(MATCHINGS[matching]())
        .schedule(SCHEDULES[schedule]())
        .budget(budget)
        .build(backend)
    )


RECIPE = ("preset", "budget", "sinks", "recent", "chunk", "split", "similarity", "matching", "schedule", "distinctive")
"""Options of :func:`make_compressor` that subjects take."""
