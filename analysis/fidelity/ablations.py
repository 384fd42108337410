"""The default preset, each time with one part taken away or replaced by the usual one: what each part is worth.

``python -m analysis.fidelity --ablation`` measures them beside the presets they lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centroidkv import Budget, Compressor
from centroidkv.allocation import Even, MiddleLayers
from centroidkv.matching import BipartiteSoftMatching, WardMatching
from centroidkv.partition import Alternating
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.schedule import LinearAnnealing
from centroidkv.similarity import Cosine, ExpectedLogits

PARTS: dict[str, Any] = {
    "passages": (Distinctive(score="passages", share=0.35),),
    "similarity": ExpectedLogits(),
    "matching": WardMatching(passage=0.3),
    "schedule": LinearAnnealing(initial=0.15, delta=0.005),
    "allocation": MiddleLayers(start=0.5, end=0.83, ratio=3.0),
}
"""Of ``presets.balanced``; a test holds the two together."""


def with_parts(**changed: Any) -> Callable[[Budget], Compressor]:
    """``presets.balanced`` with some of its parts exchanged."""
    parts = {**PARTS, **changed}

    def make(budget: Budget) -> Compressor:
        return (
            Compressor.builder()
            .preserve(Sinks(4), Recent(16), *parts["passages"])
            .partition(Alternating(chunk_size=256))
            .similarity(parts["similarity"])
            .matching(parts["matching"])
            .schedule(parts["schedule"])
            .allocation(parts["allocation"])
            .budget(budget)
            .build()
        )

    return make


ABLATIONS = {
    "even layers": with_parts(allocation=Even()),
    "no passages set aside": with_parts(passages=()),
    "passages without weight": with_parts(matching=WardMatching(passage=0.0)),
    "neither": with_parts(passages=(), matching=WardMatching(passage=0.0)),
    "leverage of single heads": with_parts(passages=(Distinctive(score="leverage", share=0.35),)),
    "weight: degree": with_parts(matching=WardMatching("degree")),
    "cosine instead of logits": with_parts(similarity=Cosine(), matching=BipartiteSoftMatching()),
    "rounds of a half": with_parts(schedule=LinearAnnealing(initial=0.5, delta=0.05)),
}
COMPARED = ("balanced", *ABLATIONS, "centroidkv")
"""What ``--ablation`` measures, in this order."""
