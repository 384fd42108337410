"""How layers share a budget: every allocation gives positive shares with a mean of 1, and budgets add up."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import Budget, Compressor, presets
from centroidkv.allocation import Even, MiddleLayers, spread
from centroidkv.errors import BudgetError, StageError
from centroidkv.preserve import Recent, Sinks
from centroidkv.protocols import Allocation

middles = st.builds(
    lambda start, width, ratio: MiddleLayers(start, min(1.0, start + width), ratio),
    st.floats(0, 0.9), st.floats(0.05, 1), st.floats(0.01, 100),
)  # fmt: skip
allocations = st.one_of(st.just(Even()), middles)
models = st.integers(1, 40).map(lambda n: [(i + 0.5) / n for i in range(n)])


@given(allocations, models)
def test_shares_are_positive_and_one_on_average(allocation, depths):
    assert isinstance(allocation, Allocation)
    shares = allocation(depths)
    assert len(shares) == len(depths)
    assert min(shares) > 0
    assert math.isclose(sum(shares), len(shares), rel_tol=1e-9)
    assert allocation(depths) == shares
    assert allocation([]) == []


@given(middles, models)
def test_inside_gets_ratio_times_what_is_outside(allocation, depths):
    shares = allocation(depths)
    inside = {s for s, d in zip(shares, depths, strict=True) if allocation.start <= d < allocation.end}
    outside = set(shares) - inside if len(set(shares)) > 1 else set()
    if inside and outside:
        assert max(inside) / max(outside) == pytest.approx(allocation.ratio)


@given(allocations, models, st.floats(0.01, 1))
def test_ratios_spend_all_of_the_budget_and_no_layer_more_than_it_has(allocation, depths, ratio):
    budgets = spread(Budget.ratio(ratio), allocation, depths)
    amounts = [budget.amount for budget in budgets]
    assert sum(amounts) == pytest.approx(ratio * len(depths), rel=1e-6)
    assert all(0 < amount <= 1 for amount in amounts)
    shares = allocation(depths)
    order = sorted(range(len(depths)), key=lambda i: shares[i])
    assert all(amounts[a] <= amounts[b] * (1 + 1e-9) + 1e-12 for a, b in itertools.pairwise(order))


@given(allocations, models, st.integers(200, 10**6))
def test_numbers_of_slots_are_rounded_down(allocation, depths, slots):
    for budget, share in zip(spread(Budget.tokens(slots), allocation, depths), allocation(depths), strict=True):
        assert budget.kind == "tokens"
        assert max(slots * share - 1, 1) <= budget.amount <= max(slots * share * (1 + 1e-9), 1)


def test_an_even_allocation_changes_nothing():
    compressor = presets.centroidkv(0.3)
    assert compressor.for_layers([0.1, 0.5, 0.9]) == [compressor] * 3


def test_layers_get_their_own_budgets_and_are_themselves_even():
    low, middle, high = presets.balanced(0.25).for_layers([1 / 6, 0.5, 5 / 6])
    assert [each.budget for each in (low, middle, high)] == [Budget.ratio(0.15), Budget.ratio(0.45), Budget.ratio(0.15)]
    assert middle.for_layers([0.5]) == [middle]
    assert middle.preservers == presets.balanced(0.25).preservers


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda depths: [1.0], "each of 2 layers, got 1"),
        (lambda depths: [2.0, 0.0], "positive"),
        (lambda depths: [math.nan, 1.0], "positive"),
        (lambda depths: [2.0, 1.0], "mean of 1.*1.5"),
    ],
)
def test_shares_that_do_not_share_the_budget_are_refused(function, reason):
    compressor = Compressor.builder().allocation(function).build()
    with pytest.raises(StageError, match=reason):
        compressor.for_layers([0.25, 0.75])


@pytest.mark.parametrize(
    "wrong", [{"start": 0.5, "end": 0.5}, {"start": -0.1}, {"end": 1.1}, {"ratio": 0.0}, {"ratio": math.inf}]
)
def test_bad_depths_and_ratios_are_refused(wrong):
    with pytest.raises(StageError, match=str(next(iter(wrong.values())))):
        MiddleLayers(**wrong)


def test_a_layer_that_could_not_hold_what_is_preserved_is_refused_by_name():
    compressor = Compressor.builder().preserve(Sinks(4), Recent(60)).allocation(MiddleLayers()).budget(100).build()
    with pytest.raises(BudgetError, match=r"Budget\.tokens\(60\) cannot hold"):
        compressor.for_layers([0.2, 0.6, 0.9])


def test_builders_take_objects_and_functions_only():
    with pytest.raises(StageError, match="class MiddleLayers"):
        Compressor.builder().allocation(MiddleLayers).build()
    with pytest.raises(StageError, match="allocation"):
        Compressor.builder().allocation(3).build()
