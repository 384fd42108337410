"""What fast paths need to know about the stages of a round, and for which stages there is a fast path.

A fast path for its formula may replace a stage whose class has a ``formula``. A subclass must declare its own, so that
an overridden stage is never bypassed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from centroidkv.rounds.scorers import SCORERS, Scorer
from centroidkv.rounds.stages import Stages
from centroidkv.state import KVState
from centroidkv.traits import SimilarityTraits, own

COSINE_SOFT = ("cosine", "soft")
"""The formulas of the similarity and the matcher that most fast paths are written for."""


@dataclass(frozen=True)
class Settings:
    """What the stages decide, as fast paths need to know it.

    Args:
        chunk: slots per chunk.
        rank: over the whole "sequence", or within each "chunk".
        mass: the slot data that the scorer sees in place of degrees.
        scorer: makes the scorer of a group of heads (rows times heads).
        step: what similarities are rounded to multiples of, if anything.
    """

    chunk: int
    rank: str
    mass: str | None
    scorer: Callable[[KVState, slice], Scorer]
    step: float | None = None

    @classmethod
    def of(cls, stages: Stages) -> Settings:
        """Those of stages for which :func:`why_no_settings` finds no reason against them."""
        similarity, split, said = stages.similarity, stages.partition, stages.said
        return cls(
            chunk=split.chunk_size,  # type: ignore[attr-defined]  # formulas vouch for the parameters they know
            rank=said.rank,
            mass=said.mass,
            scorer=partial(SCORERS[formulas(stages)], similarity),
            step=SimilarityTraits.of(similarity).step,
        )


def formulas(stages: Stages) -> tuple[Any, Any]:
    """The formulas of the similarity and the matcher, None where there is none."""
    return own(stages.similarity, "formula"), own(stages.matching, "formula")


def why_no_settings(stages: Stages) -> str | None:
    """Why no fast path knows these stages; None if there is one.

    >>> from centroidkv.aggregate import DegreeWeightedMean
    >>> from centroidkv.matching import BipartiteSoftMatching, Evict
    >>> from centroidkv.partition import Alternating
    >>> from centroidkv.similarity import Cosine
    >>> stages = Stages(Alternating(64), Cosine(), BipartiteSoftMatching(), DegreeWeightedMean())
    >>> why_no_settings(stages), Settings.of(stages).chunk
    (None, 64)
    >>> why_no_settings(Stages(Alternating(64), Cosine(), Evict(), DegreeWeightedMean()))
    'no fast path knows Evict()'
    """
    partition, similarity, aggregate = stages.partition, stages.similarity, stages.aggregate
    for stage in (partition, similarity, stages.matching, aggregate):
        if own(stage, "formula") is None:
            return f"no fast path knows {stage!r}"
    if own(partition, "formula") != "alternating" or partition.chunk_size is None:  # type: ignore[attr-defined]
        return f"fast paths pair neighbours inside chunks of a fixed size, not by {partition!r}"
    seen = SimilarityTraits.of(similarity)
    if (seen.rope, seen.heads) != ("after", "each"):
        return f"fast paths compare keys after RoPE, head by head, not as {similarity!r}"
    if own(aggregate, "formula") != "degree-weighted mean":
        return f"fast paths average by degree, not by {aggregate!r}"
    if formulas(stages) not in SCORERS:
        return f"no fast path combines {similarity!r} with {stages.matching!r}"
    return None
