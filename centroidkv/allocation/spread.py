"""From shares to whole budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from centroidkv.errors import StageError
from centroidkv.records import Budget


def spread(
    budget: Budget, allocation: Callable[[Sequence[float]], Sequence[float]], depths: Sequence[float]
) -> list[Budget]:
    """One budget per layer, ``budget`` times its share; together at most ``budget`` for every layer, but for the one
    slot that each keeps at least.

    A layer cannot keep more tokens than there are: what a ratio would give it beyond 1 goes to the others, in
    proportion to their shares. Numbers of slots are rounded down; what they give a layer beyond its tokens is not used.

    Args:
        budget: of a layer on average.
        allocation: an Allocation, or a function ``depths -> shares``.
        depths: where in the model each layer lies, between 0 and 1.

    Raises:
        StageError: not one positive share per layer, or their mean is not 1.

    >>> spread(Budget.ratio(0.25), lambda depths: [2.0, 0.5, 0.5], [0.2, 0.5, 0.8])
    [Budget.ratio(0.5), Budget.ratio(0.125), Budget.ratio(0.125)]
    >>> spread(Budget.ratio(0.75), lambda depths: [1.5, 0.75, 0.75], [0.2, 0.5, 0.8])
    [Budget.ratio(1.0), Budget.ratio(0.625), Budget.ratio(0.625)]
    """
    shares = [float(share) for share in allocation(depths)]
    if len(shares) != len(depths):
        raise StageError(f"{allocation!r} must give a share to each of {len(depths)} layers, got {len(shares)}")
    if not all(math.isfinite(share) and share > 0 for share in shares):
        raise StageError(f"an allocation's shares are positive, {allocation!r} gave {shares}")
    if shares and not math.isclose(sum(shares), len(shares), rel_tol=1e-6):
        raise StageError(
            f"an allocation's shares have a mean of 1, those of {allocation!r} {sum(shares) / len(shares):g}"
        )
    if len(set(shares)) <= 1:
        return [budget] * len(shares)
    if budget.kind == "tokens":
        return [Budget.tokens(max(1, math.floor(budget.amount * share * (1 + 1e-12)))) for share in shares]
    full: set[int] = set()  # layers that keep everything
    while True:
        others = [index for index in range(len(shares)) if index not in full]
        left = budget.amount * len(shares) - len(full)
        scale = left / sum(shares[index] for index in others) if others else 0.0
        more = {index for index in others if shares[index] * scale > 1}
        if not more:
            ratios = [1.0 if index in full else share * scale for index, share in enumerate(shares)]
            # To twelve places: 0.45, which is 45 slots of 100, and not 0.44999999999999996, which is 44.
            return [Budget.ratio(max(round(ratio, 12), 1e-12)) for ratio in ratios]
        full |= more
