"""Laws of allocations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from centroidkv.allocation import depths_of, spread
from centroidkv.records import Budget
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory
from centroidkv.traits import AllocationTraits


@dataclass(frozen=True)
class LayersCase:
    """A model of ``layers`` layers of which every ``step``-th is compressed, from ``first`` on."""

    layers: int
    first: int = 0
    step: int = 1

    def depths(self) -> list[float]:
        """Where the compressed layers lie."""
        return depths_of(range(self.first, self.layers, self.step), self.layers)


models = st.builds(LayersCase, st.integers(0, 90), st.integers(0, 3), st.integers(1, 6))
DEEP = (*map(LayersCase, (1, 2, 28, 61, 64, 65, 80, 126, 257, 513, 1000)), LayersCase(2100, 1, 2))
"""Always tried: more layers than any table has."""


def shares_of(allocation: Any, depths: Sequence[float]) -> list[float]:
    """The shares as numbers; the depths given must stay what they are."""
    shares = expect_inputs_unchanged(allocation, depths=depths)
    return [float(share) for share in shares]


@law("every layer gets a positive, finite share", models, always=DEEP)
def every_layer_gets_a_share(allocation: Any, case: LayersCase) -> None:
    depths = case.depths()
    shares = shares_of(allocation, depths)
    expect(len(shares) == len(depths), f"{len(depths)} shares", shares)
    expect(all(math.isfinite(share) and share > 0 for share in shares), "positive shares", shares)


@law("shares have a mean of 1, so that the budget is spent and not exceeded", models, always=DEEP)
def shares_are_one_on_average(allocation: Any, case: LayersCase) -> None:
    shares = shares_of(allocation, case.depths())
    good = math.isclose(math.fsum(shares), len(shares), rel_tol=1e-6)
    expect(good, f"a sum of {len(shares)}", math.fsum(shares))


@law(
    "shares depend on the depths alone, whatever was asked before, in a list or a tuple",
    st.lists(models, min_size=1, max_size=4),
    first=([LayersCase(12), LayersCase(80), LayersCase(12), LayersCase(5, 1, 2)],),
)
def is_pure(allocation: Any, several: list[LayersCase]) -> None:
    expect_no_memory(allocation, lambda stage, case: shares_of(stage, case.depths()), several)
    for case in several:
        depths = case.depths()
        listed, fixed = shares_of(allocation, depths), shares_of(allocation, tuple(depths))
        expect(listed == fixed, f"{listed} of a tuple as of a list", fixed)


@law("what says that it is even gives every layer the same", models, always=DEEP)
def even_means_even(allocation: Any, case: LayersCase) -> None:
    if not AllocationTraits.of(allocation).even:
        return
    shares = shares_of(allocation, case.depths())
    expect(
        all(math.isclose(share, 1.0, rel_tol=1e-6) for share in shares), "shares of 1, as `even` is declared", shares
    )


@law("ratios of a budget add up to it, and no layer keeps more than it has", models, always=DEEP)
def budgets_add_up(allocation: Any, case: LayersCase) -> None:
    depths = case.depths()
    for ratio in (0.1, 0.25, 0.9):
        amounts = [budget.amount for budget in spread(Budget.ratio(ratio), allocation, depths)]
        expect(all(0 < amount <= 1 for amount in amounts), "ratios in (0, 1]", amounts)
        good = math.isclose(math.fsum(amounts), ratio * len(depths), rel_tol=1e-6, abs_tol=1e-9)
        expect(good, f"ratios that add up to {ratio * len(depths):g}", math.fsum(amounts))


ALLOCATION_LAWS = (is_pure, every_layer_gets_a_share, shares_are_one_on_average, even_means_even, budgets_add_up)


def check_allocation(allocation: Any, examples: int | None = None) -> None:
    """Check an allocation (an object or a function ``depths -> shares``) against every law of its family.

    >>> from centroidkv.allocation import MiddleLayers
    >>> check_allocation(MiddleLayers(), examples=10)
    """
    check_all(ALLOCATION_LAWS, allocation, examples)
