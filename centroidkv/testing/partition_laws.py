"""Laws of partitions and schedules: families that see only whole numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from centroidkv.protocols import split_slots
from centroidkv.schedule import plan_sizes
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.oracles import chunks_of

lengths = st.integers(0, 8) | st.integers(0, 60) | st.integers(0, 3000)


@law("sources and targets are disjoint, lie in 0..n-1, and together are all slots", lengths)
def covers_every_slot_once(partitioner: Any, length: int) -> None:
    partition = split_slots(partitioner, length)
    named = sorted(slot for sources, targets in chunks_of(partition) for slot in (*sources, *targets))
    expect(named == list(range(length)), f"every slot of 0..{length - 1} exactly once", named)


@law("chunks are stretches of neighbours: none reaches into another", lengths)
def chunks_do_not_interleave(partitioner: Any, length: int) -> None:
    spans = sorted((min(s + t), max(s + t)) for s, t in chunks_of(split_slots(partitioner, length)) if s + t)
    expect(all(a[1] < b[0] for a, b in pairwise(spans)), "stretches one after the other", spans)


@law("a sequence of two or more slots has something to merge, and one round takes at most half", lengths)
def capacity_is_positive_and_at_most_half(partitioner: Any, length: int) -> None:
    capacity = split_slots(partitioner, length).capacity
    low = 1 if length >= 2 else 0
    expect(low <= capacity <= length // 2, f"a capacity in {low}..{length // 2}", capacity)


@law("the split is a pure function of the length: no global random state is read or moved", lengths)
def is_pure(partitioner: Any, length: int) -> None:
    first = chunks_of(split_slots(partitioner, length))
    torch.manual_seed(length)
    random.seed(length)
    before = torch.get_rng_state(), random.getstate()
    second = chunks_of(split_slots(partitioner, length))
    expect(second == first, f"the same split again: {first}", second)
    same = torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    expect(same, "global random state left alone", "global random state moved")


PARTITION_LAWS = (covers_every_slot_once, chunks_do_not_interleave, capacity_is_positive_and_at_most_half, is_pure)


def check_partition(partitioner: Any, examples: int | None = None) -> None:
    """Check a partitioner against every law of its family; raises LawViolation.

    >>> from centroidkv.partition import Alternating
    >>> check_partition(Alternating(chunk_size=6), examples=10)
    """
    check_all(PARTITION_LAWS, partitioner, examples)


@dataclass(frozen=True)
class ScheduleCase:
    """A run from ``length`` slots towards ``target``; a matcher that can remove ``share`` per cent of them a round."""

    length: int
    target: int
    share: int = 50

    def capacity(self, slots: int) -> int:
        """What the matcher can remove from ``slots``."""
        return slots * self.share // 100


schedules = st.builds(ScheduleCase, st.integers(0, 3000), st.integers(1, 400), st.sampled_from([10, 50, 99]))


@law("rates are numbers in [0, 1]", st.integers(0, 10**6))
def rates_are_shares(schedule: Any, index: int) -> None:
    rate = schedule(index)
    expect(isinstance(rate, int | float) and 0 <= rate <= 1, "a rate in [0, 1]", rate)


@law("asking twice, in any order, gives the same rates", st.lists(st.integers(0, 50), max_size=8))
def is_not_consumed(schedule: Any, order: list[int]) -> None:
    first = {index: schedule(index) for index in sorted(order)}
    second = {index: schedule(index) for index in reversed(order)}
    expect(first == second, f"the same rates again: {first}", second)


@law("sizes are whole numbers that fall, never past the target, never by more than the matcher can", schedules)
def sizes_fall_within_capacity(schedule: Any, case: ScheduleCase) -> None:
    sizes = plan_sizes(schedule, case.length, case.target, case.capacity)
    for before, after in pairwise((case.length, *sizes)):
        expect(isinstance(after, int), "whole numbers", sizes)
        low = max(case.target, before - case.capacity(before))
        expect(low <= after < before, f"a size in {low}..{before - 1} after {before}", after)


@law("a plan stops only at the target, at a rate of 0, or where nothing can merge", schedules)
def stops_only_for_a_reason(schedule: Any, case: ScheduleCase) -> None:
    sizes = plan_sizes(schedule, case.length, case.target, case.capacity)
    last = sizes[-1] if sizes else case.length
    stuck = case.capacity(last) < 1 or schedule(len(sizes)) == 0
    expect(last <= case.target or stuck, f"going on from {last} to {case.target}", f"a stop at {last}")


@law("rates never rise", st.integers(0, 10**6))
def rates_never_rise(schedule: Any, index: int) -> None:
    now, then = schedule(index), schedule(index + 1)
    expect(then <= now, f"at most {now} in round {index + 1}", then)


SCHEDULE_LAWS = (rates_are_shares, is_not_consumed, sizes_fall_within_capacity, stops_only_for_a_reason)


def check_schedule(schedule: Any, examples: int | None = None, *, monotone: bool = True) -> None:
    """Check a schedule against every law of its family; ``monotone=False`` for one whose rates may rise.

    >>> from centroidkv.schedule import Constant
    >>> check_schedule(Constant(0.1), examples=10)
    """
    check_all(SCHEDULE_LAWS + ((rates_never_rise,) if monotone else ()), schedule, examples)
