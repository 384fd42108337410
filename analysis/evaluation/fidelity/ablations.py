"""The default preset, each time with one part taken away or replaced by the usual one: what each part is worth.

``python -m analysis fidelity --ablation`` measures them beside the presets they lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centroidkv import Budget, Compressor, presets
from centroidkv.allocation import Even
from centroidkv.matching import BipartiteSoftMatching, WardMatching
from centroidkv.preserve import Distinctive
from centroidkv.schedule import LinearAnnealing
from centroidkv.similarity import Cosine


def with_parts(*passages: Distinctive, **changed: Any) -> Callable[[Budget], Compressor]:
    """``presets.balanced`` with some of its parts exchanged, among them what it sets aside beside the windows."""

    def make(budget: Budget) -> Compressor:
        whole = presets.balanced(budget)
        windows = [member for member in whole.preservers.members if not isinstance(member, Distinctive)]
        return whole.with_(preserve=(*windows, *passages), **changed)

    return make


PASSAGES = next(m for m in presets.balanced().preservers.members if isinstance(m, Distinctive))
ABLATIONS = {
    "even layers": with_parts(PASSAGES, allocation=Even()),
    "no passages set aside": with_parts(),
    "passages without weight": with_parts(PASSAGES, matching=WardMatching(passage=0.0)),
    "neither": with_parts(matching=WardMatching(passage=0.0)),
    "leverage of single heads": with_parts(Distinctive(score="leverage", share=0.35)),
    "weight: degree": with_parts(PASSAGES, matching=WardMatching("degree")),
    "cosine instead of logits": with_parts(PASSAGES, similarity=Cosine(), matching=BipartiteSoftMatching()),
    "rounds of a half": with_parts(PASSAGES, schedule=LinearAnnealing(initial=0.5, delta=0.05)),
}
COMPARED = ("balanced", *ABLATIONS, "centroidkv")
"""What ``--ablation`` measures, in this order."""
