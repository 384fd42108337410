"""Laws of schedules."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

from hypothesis import strategies as st

from centroidkv.schedule import plan_sizes
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.memory import expect_no_memory

ROUNDS = (range(600), range(990, 1100, 3), range(10**6, 10**6 + 3))
"""Always tried: more rounds than any table has."""


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
LONG = (ScheduleCase(70_000, 3), ScheduleCase(5000, 2, 1), ScheduleCase(10**6, 10**5, 99))


@law("rates are numbers in [0, 1]", st.integers(0, 10**6).map(lambda index: [index]), always=ROUNDS)
def rates_are_shares(schedule: Any, indices: Any) -> None:
    for index in indices:
        rate = schedule(index)
        number = isinstance(rate, Real) and not isinstance(rate, bool)
        expect(number and 0 <= rate <= 1, f"a rate in [0, 1] for round {index}", f"{rate!r}")


@law(
    "asking again, in any order, or a copy, gives the same rates: nothing is used up",
    st.lists(st.integers(0, 50), max_size=8),
    first=(range(600), [3, 0, 99, 1, 0, 2]),
)
def is_not_consumed(schedule: Any, order: Any) -> None:
    expect_no_memory(schedule, lambda stage, index: stage(index), list(order))


@law(
    "a plan made again, after others, is the same plan",
    st.lists(schedules, min_size=1, max_size=3),
    first=([ScheduleCase(3000, 10), ScheduleCase(100, 90), ScheduleCase(3000, 10), ScheduleCase(7, 1)],),
)
def plans_are_repeated(schedule: Any, several: list[ScheduleCase]) -> None:
    expect_no_memory(schedule, lambda stage, case: plan_sizes(stage, case.length, case.target, case.capacity), several)


@law("sizes are whole numbers that fall, never past the target, never by more than the matcher can", schedules,
     always=LONG)  # fmt: skip
def sizes_fall_within_capacity(schedule: Any, case: ScheduleCase) -> None:
    sizes = plan_sizes(schedule, case.length, case.target, case.capacity)
    for before, after in pairwise((case.length, *sizes)):
        expect(isinstance(after, int), "whole numbers", sizes)
        low = max(case.target, before - case.capacity(before))
        expect(low <= after < before, f"a size in {low}..{before - 1} after {before}", after)


@law("a plan stops only at the target, at a rate of 0, or where nothing can merge", schedules, always=LONG)
def stops_only_for_a_reason(schedule: Any, case: ScheduleCase) -> None:
    sizes = plan_sizes(schedule, case.length, case.target, case.capacity)
    last = sizes[-1] if sizes else case.length
    stuck = case.capacity(last) < 1 or schedule(len(sizes)) == 0
    expect(last <= case.target or stuck, f"going on from {last} to {case.target}", f"a stop at {last}")


@law("rates never rise", st.integers(0, 10**6).map(lambda index: [index, index + 1]), always=ROUNDS)
def rates_never_rise(schedule: Any, indices: Any) -> None:
    for one, two in pairwise(indices):
        now, then = schedule(one), schedule(two)
        expect(then <= now, f"at most {now} in round {two}", then)


SCHEDULE_LAWS = (
    is_not_consumed,
    plans_are_repeated,
    rates_are_shares,
    sizes_fall_within_capacity,
    stops_only_for_a_reason,
)


def check_schedule(schedule: Any, examples: int | None = None, *, monotone: bool = True) -> None:
    """Check a schedule against every law of its family; ``monotone=False`` for one whose rates may rise.

    What is used up by asking shows in an object's first calls only, so check one that was not asked before.

    >>> from centroidkv.schedule import Constant
    >>> check_schedule(Constant(0.1), examples=10)
    """
    check_all(SCHEDULE_LAWS + ((rates_never_rise,) if monotone else ()), schedule, examples)
