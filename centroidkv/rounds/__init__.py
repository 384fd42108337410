"""How rounds run: stage by stage (the definition), blocked or compiled on the CPU, or as kernels on a GPU.

Stages can always be carried out one after the other, whatever they are. For some combinations there are faster ways to
the same result. Which ones is read off what the stages declare: a fast path for its formula may replace a stage whose
class has a ``formula``. A subclass must declare its own, so that an overridden stage is never bypassed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from centroidkv.rounds.blocked import Settings, blocked_rounds
from centroidkv.rounds.kernels import kernels_take, triton_rounds
from centroidkv.rounds.native import native_rounds, why_not_settings
from centroidkv.rounds.reference import Stages, reference_rounds
from centroidkv.rounds.scorers import SCORERS

__all__ = [
    "Settings", "Stages", "blocked_rounds", "kernels_take", "native_rounds", "reference_rounds", "settings_of",
    "triton_rounds", "why_not_settings",
]  # fmt: skip


def settings_of(partition: Any, similarity: Any, matching: Any, aggregate: Any) -> Settings | str:
    """What a fast path needs to know about these stages, or why there is none for them.

    >>> from centroidkv.aggregate import DegreeWeightedMean
    >>> from centroidkv.matching import BipartiteSoftMatching, Evict
    >>> from centroidkv.partition import Alternating
    >>> from centroidkv.similarity import Cosine
    >>> settings_of(Alternating(64), Cosine(), BipartiteSoftMatching(), DegreeWeightedMean()).chunk
    64
    >>> settings_of(Alternating(64), Cosine(), Evict(), DegreeWeightedMean())
    'no fast path knows Evict()'
    """
    for stage in (partition, similarity, matching, aggregate):
        if _formula(stage) is None:
            return f"no fast path knows {stage!r}"
    if _formula(partition) != "alternating" or partition.chunk_size is None:
        return f"fast paths pair neighbours inside chunks of a fixed size, not by {partition!r}"
    if getattr(similarity, "rope", "after") != "after" or getattr(similarity, "heads", "each") != "each":
        return f"fast paths compare keys after RoPE, head by head, not as {similarity!r}"
    if _formula(aggregate) != "degree-weighted mean":
        return f"fast paths average by degree, not by {aggregate!r}"
    scorer = SCORERS.get((_formula(similarity), _formula(matching)))
    if scorer is None:
        return f"no fast path combines {similarity!r} with {matching!r}"
    return Settings(
        chunk=partition.chunk_size,
        rank=getattr(matching, "rank", "sequence"),
        mass=getattr(matching, "mass", None),
        scorer=partial(scorer, similarity),
        cosine=(_formula(similarity), _formula(matching)) == ("cosine", "soft"),
        step=getattr(similarity, "step", None),
    )


def _formula(stage: Any) -> str | None:
    return vars(type(stage)).get("formula")
