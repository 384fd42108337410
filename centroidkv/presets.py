"""Named methods, each assembled from public parts.

Every preset takes a budget (a Budget, a float ratio or a whole number of slots) and returns a Compressor. Where a paper
leaves a number open, the number is ours; the sources name the idea, not our settings.
"""

from __future__ import annotations

from centroidkv.allocation import MiddleLayers
from centroidkv.compressor import Compressor
from centroidkv.matching import BipartiteSoftMatching, Evict, KMeans, WardMatching
from centroidkv.partition import Alternating
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.records import Budget
from centroidkv.schedule import Constant, FewestRounds, LinearAnnealing
from centroidkv.similarity import Cosine, ExpectedLogits, NegativeEuclidean

__all__ = [
    "ALL",
    "balanced",
    "centroidkv",
    "distinctive",
    "keydiff",
    "kmeans",
    "knorm",
    "quick",
    "streaming_llm",
    "tome",
]

QUARTER = Budget.ratio(0.25)
SMALL_STEPS = LinearAnnealing(initial=0.1, delta=0.005)
"""Many small rounds: they blur less than few big ones (README, "Choosing")."""


def centroidkv(budget: Budget | float = QUARTER) -> Compressor:
    """Chunked soft matching with sinks and a recent window: CentroidKV, arXiv 2506.11418."""
    return (
        Compressor.builder()
        .preserve(Sinks(4), Recent(64))
        .partition(Alternating(chunk_size=256))
        .matching(BipartiteSoftMatching(rank="sequence"))
        .schedule(SMALL_STEPS)
        .budget(budget)
        .build()
    )


def quick(budget: Budget | float = QUARTER) -> Compressor:
    """:func:`centroidkv` in shorter chunks and fewer steps: a third of its time, as good on prose. Numbers ours.

    Fewer choices also leave less to the last digits of the keys (docs/vllm.md, "How far a text depends on rounding").
    """
    return (
        Compressor.builder()
        .preserve(Sinks(4), Recent(64))
        .partition(Alternating(chunk_size=64))
        .schedule(LinearAnnealing(initial=0.35, delta=0.02))
        .budget(budget)
        .build()
    )


def distinctive(budget: Budget | float = QUARTER) -> Compressor:
    """Chunked soft matching that sets aside the keys of highest statistical leverage before RoPE. Ours.

    The score is that of *Compactor*, arXiv 2507.08143, which evicts by it; here the rest is clustered.
    """
    return (
        Compressor.builder()
        .preserve(Sinks(4), Recent(64), Distinctive(score="leverage", share=0.5))
        .partition(Alternating(chunk_size=256))
        .schedule(SMALL_STEPS)
        .budget(budget)
        .build()
    )


def balanced(budget: Budget | float = QUARTER) -> Compressor:
    """Clusters slots that future queries are expected to treat alike, and sets distinctive passages aside. Ours.

    Slots merge by Ward's criterion on expected logits and values, weighted by expected attention and by how distinctive
    their passage is. Layers past the middle, which look up exact strings, get three times the slots of the others.
    Needs the model's queries, which CentroidCache collects.
    """
    return (
        Compressor.builder()
        .preserve(Sinks(4), Recent(16), Distinctive(score="passages", share=0.35))
        .partition(Alternating(chunk_size=256))
        .similarity(ExpectedLogits())
        .matching(WardMatching(passage=0.3))
        .schedule(LinearAnnealing(initial=0.15, delta=0.005))
        .allocation(MiddleLayers(start=0.5, end=0.83, ratio=3.0))
        .budget(budget)
        .build()
    )


def tome(budget: Budget | float = QUARTER) -> Compressor:
    """Token merging over the whole sequence, one decision for all heads: arXiv 2210.09461. Nothing is preserved."""
    return (
        Compressor.builder()
        .preserve()
        .partition(Alternating(chunk_size=None))
        .similarity(Cosine(heads="mean"))
        .schedule(Constant(0.5))
        .budget(budget)
        .build()
    )


def kmeans(budget: Budget | float = QUARTER) -> Compressor:
    """Ten Lloyd iterations per head between sinks and recent window: the offline clustering to compare with."""
    return (
        Compressor.builder()
        .preserve(Sinks(4), Recent(64))
        .similarity(NegativeEuclidean())
        .matching(KMeans(iterations=10))
        .schedule(FewestRounds())
        .budget(budget)
        .build()
    )


def streaming_llm(budget: Budget | float = QUARTER) -> Compressor:
    """Four sinks and the most recent tokens, the rest evicted: arXiv 2309.17453.

    Keys stay at their original positions; the original rotates them anew by their place in the cache.
    """
    return (
        Compressor.builder()
        .preserve(Sinks(4), Recent(share=1.0))
        .matching(Evict())
        .schedule(FewestRounds())
        .budget(budget)
        .build()
    )


def keydiff(budget: Budget | float = QUARTER) -> Compressor:
    """Keep the keys least like the mean direction, per head, evict the rest: KeyDiff, arXiv 2504.15364."""
    return (
        Compressor.builder()
        .preserve(Distinctive(score="cosine", share=1.0, rope="after"))
        .matching(Evict())
        .schedule(FewestRounds())
        .budget(budget)
        .build()
    )


def knorm(budget: Budget | float = QUARTER) -> Compressor:
    """Keep the keys of lowest norm, per head, evict the rest: arXiv 2406.11430."""
    return (
        Compressor.builder()
        .preserve(Distinctive(score="low_norm", share=1.0, rope="after"))
        .matching(Evict())
        .schedule(FewestRounds())
        .budget(budget)
        .build()
    )


ALL = {
    preset.__name__: preset
    for preset in (balanced, centroidkv, quick, distinctive, tome, kmeans, streaming_llm, keydiff, knorm)
}
"""Every preset by name."""
