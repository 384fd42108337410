"""The stages of a round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from centroidkv.protocols import Aggregator, Matcher, Partitioner, Similarity, matcher_capacity
from centroidkv.protocols import split_slots as split_by
from centroidkv.records import Partition
from centroidkv.state import KVState
from centroidkv.traits import LookingTraits, MatcherTraits, own


@dataclass(frozen=True)
class Stages:
    """The four stages of a round."""

    partition: Partitioner
    similarity: Similarity
    matching: Matcher
    aggregate: Aggregator

    @cached_property
    def said(self) -> MatcherTraits:
        """What the matcher says of itself; planning asks for every round."""
        return MatcherTraits.of(self.matching)

    def split(self, length: int) -> Partition:
        """The partition of ``length`` slots; one without sides for a matcher that works on all slots."""
        if self.said.needs_partition:
            return split_by(self.partition, length)
        return Partition(length, ())

    def capacity(self, length: int) -> int:
        """The most slots that one round can remove from ``length``."""
        # A partition that can tell without listing its slots says so itself.
        known = own(self.partition, "capacity")
        if known is not None and self.said.needs_partition:
            return int(known(self.partition, length))
        return matcher_capacity(self.matching, self.split(length))

    def prepare(self, state: KVState, free: Tensor) -> KVState:
        """Let the stages that want to compute something once per compression do so; ``free`` slots may merge."""
        for stage in (self.similarity, self.matching):
            prepare = LookingTraits.of(stage).prepare
            state = state if prepare is None else prepare(state, free)
        return state
