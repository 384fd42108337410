"""What a datum that travels with slots means: how it merges, and what a slot has that nobody told about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from centroidkv.errors import StageError

__all__ = [
    "SlotDatum",
]

MERGES = ("keep", "sum", "mean")


@dataclass(frozen=True)
class SlotDatum:
    """How one entry of ``KVState.slot_data`` behaves. Who adds the entry says it, and nobody else has to know it.

    Args:
        merge: when slots merge, "keep": the entry of the slot that stays; "sum": all entries added up; "mean": their
            mean, weighted by degree.
        fill: the entry of slots that nobody told about it: tokens that come later, empty slots.
        lasting: whether an entry that a stage prepares is there after the compression too, and so at the next one.

    >>> SlotDatum("mean", lasting=True)
    SlotDatum(merge='mean', fill=0.0, lasting=True)

    Raises:
        StageError: no such merge, or a fill that is no finite number.
    """

    merge: str = "keep"
    fill: float = 0.0
    lasting: bool = False

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise StageError(f"slot data merges by one of {MERGES}, got {self.merge!r}")
        if isinstance(self.fill, bool) or not isinstance(self.fill, int | float) or not math.isfinite(self.fill):
            raise StageError(f"slot data is filled with a finite number, got {self.fill!r}")
        if not isinstance(self.lasting, bool):
            raise StageError(f"lasting is True or False, got {self.lasting!r}")

    @classmethod
    def read(cls, said: Any) -> dict[str, SlotDatum]:
        """The rules that :meth:`write` wrote.

        Raises:
            StageError: it did not write them.
        """
        if not isinstance(said, dict) or not all(isinstance(rule, list) and len(rule) == 3 for rule in said.values()):
            raise StageError(f"rules of slot data are [merge, fill, lasting] by name, got {said!r:.100}")
        return {name: cls(*rule) for name, rule in said.items()}

    @staticmethod
    def write(rules: Mapping[str, SlotDatum]) -> dict[str, list[Any]]:
        """For JSON."""
        return {name: [rule.merge, rule.fill, rule.lasting] for name, rule in rules.items()}


KEPT = SlotDatum()
"""What a datum without a rule does."""
