"""The law list: every exported stage, one line each. A new stage is checked by adding its line here."""

from __future__ import annotations

from functools import partial

import torch

from centroidkv import Budget, Compressor, KVState, presets
from centroidkv.aggregate import DegreeWeightedMean, KeepTargetKey
from centroidkv.allocation import Even, MiddleLayers
from centroidkv.attention import degree_attention
from centroidkv.cache import Exact, FixedState, GrowingState, Offloaded, Quantised
from centroidkv.cache.quantised import quantise
from centroidkv.matching import AllPairsMatching, BipartiteSoftMatching, Evict, KMeans, ThresholdMatching, WardMatching
from centroidkv.partition import Alternating, Halves, RandomSplit, Strided
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.rounds.reference import one_round
from centroidkv.schedule import Constant, FewestRounds, LinearAnnealing
from centroidkv.similarity import Cosine, Dot, ExpectedLogits, NegativeEuclidean

# (stage, options of its check)
PRESERVERS = [
    (Sinks(3), {}),
    (Recent(4), {}),
    (Recent(share=0.5), {}),
    (Distinctive(share=0.7, rope="after"), {}),
    (Distinctive("cosine", share=0.3, rope="before"), {}),
    (Distinctive("low_norm", share=1.0, rope="after"), {}),
    (Distinctive("passages", share=0.5), {}),
    (Distinctive(), {}),
    (Distinctive("low_norm", rope="after", precision=torch.bfloat16), {}),
    (Sinks(), {}),
    (lambda state: state.positions % 4 == 0, {}),
]
PARTITIONS = [
    (Alternating(6), {}),
    (Alternating(None), {}),
    (Halves(7), {}),
    (Strided(3, 8), {}),
    (RandomSplit(1, 6), {}),
    *((partition(), {}) for partition in (Alternating, Halves, Strided, RandomSplit)),
]
SIMILARITIES = [
    (Cosine(), {"scale_free": True}),
    (Dot(), {"copy_is_best": False}),
    (NegativeEuclidean(), {}),
    (ExpectedLogits(), {}),
    (ExpectedLogits(values=0.0, ridge=1.0), {}),
    (Cosine(step=2**-8), {"scale_free": True}),
    (NegativeEuclidean(rope="before", heads="mean"), {}),
]
MATCHERS = [
    (BipartiteSoftMatching("sequence"), {}),
    (BipartiteSoftMatching("chunk"), {}),
    (ThresholdMatching(0.3), {}),
    (ThresholdMatching(), {}),
    (AllPairsMatching(), {}),
    (KMeans(3), {}),
    (KMeans(), {}),
    (Evict(), {}),
    (WardMatching("degree"), {}),
    (WardMatching(), {}),
    (WardMatching(passage=0.5), {}),
]
AGGREGATORS = [
    (DegreeWeightedMean(), {}),
    (KeepTargetKey(), {"averages_keys": False}),
]
SCHEDULES = [
    (LinearAnnealing(0.5, 0.05), {}),
    (LinearAnnealing(0.1, 0.03, minimum=0.0), {}),
    (Constant(0.2), {}),
    (Constant(0.0), {}),
    (FewestRounds(), {}),
    (LinearAnnealing(), {}),
    (Constant(), {}),
]
ALLOCATIONS = [
    (Even(), {}),
    (MiddleLayers(), {}),
    (MiddleLayers(0.0, 0.3, 0.2), {}),
    (MiddleLayers(ratio=1.0), {}),
]


def within(bits, group=32, nested=False):
    """The error that quantised storages promise."""
    return {"error": lambda state: quantise(state, bits, group, nested).error_bound()}


STORAGES = [
    (Exact(), {}),
    (Offloaded(), {}),
    (Quantised(), within(8)),
    (Quantised(4, group=8, nested=True), within(4, 8, True)),
    (Offloaded(Quantised(4)), within(4)),
]


def stored(compressor, interval):
    """A layer whose storage gives back what it was given."""
    return GrowingState(compressor, interval, storage=Exact())


LAYERS = [(GrowingState, {}), (FixedState, {}), (stored, {})]


def small(backend: str = "auto", **parts: object) -> Compressor:
    """A compressor that preserves little, for the laws' short states."""
    builder = Compressor.builder().preserve(Sinks(1), Recent(2)).partition(Alternating(8)).budget(0.4)
    for name, part in parts.items():
        builder = getattr(builder, name)(part)
    return builder.build(backend)


COMPRESSORS = [
    (small(), {}),
    (small("reference"), {}),
    (small(budget=Budget.tokens(9)), {}),
    (small(matching=BipartiteSoftMatching("chunk")), {}),
    (small(matching=BipartiteSoftMatching("chunk"), partition=Halves(6)), {}),
    (small(matching=ThresholdMatching(0.8)), {}),
    (small(matching=AllPairsMatching(), similarity=NegativeEuclidean()), {}),
    (small(matching=KMeans(2), schedule=FewestRounds()), {}),
    (small(matching=Evict(), schedule=FewestRounds()), {}),
    (small(similarity=Cosine(heads="mean"), partition=Strided(3, 9)), {}),
    (small(matching=WardMatching("degree"), similarity=NegativeEuclidean()), {}),
    (small(matching=WardMatching(), similarity=ExpectedLogits()), {}),
    (small("reference", matching=WardMatching(), similarity=ExpectedLogits()), {}),
    (small(similarity=Cosine(rope="before"), aggregate=KeepTargetKey()), {}),
    (
        Compressor.builder()
        .preserve(Sinks(1), Recent(2), Distinctive(share=0.4, rope="after"))
        .partition(RandomSplit(0, 8))
        .schedule(Constant(0.2))
        .budget(0.6)
        .build(),
        {},
    ),
    # Presets set 68 slots aside, so of states with at most 90 slots those of 77 and more are compressed.
    *((preset(0.9), {}) for preset in presets.ALL.values()),
]


def round_by_stages(keys, values, degree, positions, chunk, quotas):
    """A round ranked within chunks as the stages do it: what a fused round is held to."""
    parts = Compressor.builder().partition(Alternating(chunk)).matching(BipartiteSoftMatching("chunk")).budget(0.5)
    after = one_round(parts.build().stages, KVState(keys, values, degree, positions), keys.shape[2] - sum(quotas))
    return after.keys, after.values, after.degree, after.positions


ATTENTIONS = [
    (partial(degree_attention, backend="reference"), {}),
    (partial(degree_attention, backend="sdpa"), {}),
    (degree_attention, {}),
]
