"""What a stage says of itself beside its call: every optional attribute, its default, and what it may be.

Stages are any objects that can be called as :mod:`centroidkv.protocols` says. What more they have to say is read here
and nowhere else, so each default stands in one place, and a name that is nearly one of these is refused instead of
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from centroidkv.errors import StageError

ALIKE = 0.9
"""From this similarity of two names on (difflib's ratio), one is taken for a misspelling of the other."""

MISSING = object()
Own = TypeVar("Own", bound="Traits")


@dataclass(frozen=True)
class Traits:
    """What a stage may say; one class per family."""

    @classmethod
    def of(cls: type[Own], stage: Any) -> Own:
        """What ``stage`` says, with defaults for the rest; unchecked."""
        return cls(
            **{
                name: value
                for name in cls.__dataclass_fields__
                if (value := getattr(stage, name, MISSING)) is not MISSING
            }
        )

    @classmethod
    def check(cls, stage: Any) -> None:
        """Refuse what a stage cannot mean.

        Raises:
            StageError: a name that is nearly one of these, or a value that none of them can have.
        """
        asked: tuple[Any, ...] = (cls, type(stage), tuple(getattr(stage, "__dict__", ())))
        for wrong, right in _misspelt(*asked):
            raise StageError(f"{stage!r} has an attribute {wrong!r}, which nothing reads; it is called {right!r}")
        said = cls.of(stage)
        for field in fields(cls):
            value = getattr(said, field.name)
            if isinstance(field.default, bool) and not isinstance(value, (bool, np.bool_)):
                raise StageError(f"{stage!r}: {field.name} is True or False, got {value!r}")
            if field.name in ALLOWED and value not in ALLOWED[field.name]:
                raise StageError(f"{stage!r}: {field.name} is one of {ALLOWED[field.name]}, got {value!r}")
            if field.name in METHODS and not (value is None or callable(value)):
                raise StageError(f"{stage!r}: {field.name} is a method, got {value!r}")
        said._check_together(stage)

    def _check_together(self, stage: Any) -> None:
        """Refuse values that exclude each other."""


@dataclass(frozen=True)
class LookingTraits(Traits):
    """What a stage may say that looks at slots: a similarity, a matcher, a preserver.

    Args:
        needs_queries: it looks at the model's queries, so states must carry them (:mod:`centroidkv.queries`).
        needs_rotary: it looks at keys before RoPE, so states must carry ``rotary``.
        pools_heads: what it decides for one KV head depends on the others.
        prepare: ``prepare(state, free) -> state``, called once per compression with the slots that may merge; what it
            adds to ``slot_data`` and ``head_data`` is there in every round and gone afterwards. Not for preservers.
    """

    needs_queries: bool = False
    needs_rotary: bool = False
    pools_heads: bool = False
    prepare: Callable[..., Any] | None = None


@dataclass(frozen=True)
class SimilarityTraits(LookingTraits):
    """What a similarity may say.

    Args:
        rope: "after": keys as cached; "before": keys un-rotated by their positions.
        heads: "each": every KV head decides for itself; "mean": one decision on head-mean keys.
        features: ``features(state) -> [B, H, T, F]``, the points that are compared in place of keys.
        step: what scores are rounded to multiples of, if anything; known to fast paths.
    """

    rope: str = "after"
    heads: str = "each"
    features: Callable[..., Any] | None = None
    step: float | None = None

    def _check_together(self, stage: Any) -> None:
        if self.features is not None and (self.rope, self.heads) != ("after", "each"):
            raise StageError(
                f"{stage!r} compares points of its own (features), for which rope={self.rope!r} and "
                f"heads={self.heads!r} would change nothing; leave them out"
            )


@dataclass(frozen=True)
class MatcherTraits(LookingTraits):
    """What a matcher may say.

    Args:
        needs_partition: False: it works on all slots, not on a partition's two sides.
        exact: False: it may remove fewer slots than asked.
        evicts: slots it removes may join nothing; their mass is lost.
        mass: the name of slot data to be given in place of degrees.
        capacity: ``capacity(length)``, the most slots one round can remove, of a matcher without a partition; all but
            one if it does not say.
        weigh: ``weigh(score, mass_a, mass_b)``, by which it weighs a pair's score before it looks for the best.
        rank: where it looks for the best: in the whole "sequence", or within each "chunk"; known to fast paths.
    """

    needs_partition: bool = True
    exact: bool = True
    evicts: bool = False
    mass: str | None = None
    capacity: Callable[[int], int] | None = None
    weigh: Callable[..., Any] | None = None
    rank: str = "sequence"

    def _check_together(self, stage: Any) -> None:
        if not (self.mass is None or isinstance(self.mass, str)):
            raise StageError(f"{stage!r}: mass is the name of slot data or None, got {self.mass!r}")


@dataclass(frozen=True)
class PreserverTraits(LookingTraits):
    """What a preserver may say, beside ``share``, ``count`` and ``select``.

    Args:
        counted: False: how many slots it selects is known only from the data.
    """

    counted: bool = True


@dataclass(frozen=True)
class AllocationTraits(Traits):
    """What an allocation may say.

    Args:
        even: it gives every layer the same, and so serves where layers must be alike.
    """

    even: bool = False


FAMILIES: dict[str, type[Traits]] = {
    "preserve": PreserverTraits,
    "similarity": SimilarityTraits,
    "matching": MatcherTraits,
    "allocation": AllocationTraits,
}
"""By the names of a compressor's parts; the stages of other families have nothing more to say."""

ALLOWED = {"rope": ("after", "before"), "heads": ("each", "mean")}
METHODS = ("prepare", "features", "capacity", "weigh")
COMMON = ("step", "rank", "weigh", "mass", "even")
"""Names that a stage may come near to with parameters of its own, such as a weight or a number of steps."""


def own(stage: Any, name: str) -> Any:
    """What the very class of ``stage`` says of ``name``, None if it is inherited or missing.

    For what vouches for a class's own code, such as the ``formula`` by which a fast path may replace it, or the
    ``capacity`` that a partition has without being made: a subclass that overrides the code does not inherit it.
    """
    return vars(type(stage)).get(name)


@lru_cache(256)  # compressors are made anew for every layer and budget, of the same few stages
def _misspelt(cls: Any, kind: type, more: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(name, right name) of every public name of a class or among ``more`` that is nearly one of the traits ``cls``."""
    known = tuple(cls.__dataclass_fields__)
    nearly = [name for name in known if name not in COMMON]
    public = (name for name in {*dir(kind), *more} if not name.startswith("_") and name not in known)
    found = ((name, get_close_matches(name, nearly, n=1, cutoff=ALIKE)) for name in sorted(public))
    return tuple((name, near[0]) for name, near in found if near)
