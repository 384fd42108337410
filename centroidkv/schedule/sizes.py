"""From rates to whole numbers: the sizes of all rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from centroidkv.errors import StageError
from centroidkv.protocols import Schedule
from centroidkv.records import exact_share


def plan_sizes(schedule: Schedule, length: int, target: int, capacity: Callable[[int], int]) -> tuple[int, ...]:
    """Slots left after each round, from ``length`` down to ``target`` or to where the schedule ends.

    Round j removes ceil(r_j * n) of its n slots, at most ``capacity(n)``, and the last round only what is still over
    the target. Rounding up lets every round with a positive rate make progress.

    >>> from centroidkv.schedule import Constant
    >>> plan_sizes(Constant(0.5), 100, 20, lambda n: n // 2)
    (50, 25, 20)
    """
    sizes: list[int] = []
    current = length
    while current > target:
        rate = schedule(len(sizes))
        if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate <= 1:
            raise StageError(f"a schedule returns rates in [0, 1], got {rate!r} for round {len(sizes)}")
        edges = min(math.ceil(exact_share(float(rate), current)), capacity(current), current - target)
        if edges < 1:
            break
        current -= edges
        sizes.append(current)
    return tuple(sizes)
