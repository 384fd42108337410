"""Laws of aggregators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.records import Assignment
from centroidkv.state import KVState
from centroidkv.testing import oracles
from centroidkv.testing.axes import mixed
from centroidkv.testing.law import check_all, expect, expect_same, law
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory
from centroidkv.testing.strategies import BEYOND_TILES, DTYPES, KINDS, StateCase, states
from centroidkv.testing.tolerances import sum_bound


@dataclass(frozen=True)
class MergeCase:
    """A state and a random assignment in which about ``percent`` per cent of the slots leave.

    ``hub``: all of them join the same slot. ``evicted``: how many of a hundred leavers join nothing.
    """

    state: StateCase
    percent: int = 50
    hub: bool = False
    evicted: int = 0

    def assignment(self) -> Assignment:
        """Random leavers, each joining a random slot that stays."""
        case, generator = self.state, self.state.generator()
        shape = (case.batch, case.heads, case.slots)
        leaves = torch.rand(shape, generator=generator) * 100 < self.percent
        leaves[..., case.seed % case.slots] = False  # one stays
        stay = (~leaves).sum(-1, keepdim=True)
        order = leaves.byte().argsort(dim=-1, stable=True)  # those that stay come first
        pick = (torch.rand(shape, generator=generator) * (1 if self.hub else stay)).long()
        joins = torch.where(leaves, order.gather(-1, torch.minimum(pick, stay - 1)), torch.arange(case.slots))
        gone = leaves & (torch.rand(shape, generator=generator) * 100 < self.evicted)
        return Assignment(joins.masked_fill(gone, -1))


MILD = tuple(kind for kind in KINDS if kind != "extreme")
merges = st.builds(
    MergeCase,
    state=states(least=1, most=24, dtypes=("float32", "bfloat16", "float16"), kinds=MILD, gaps=True),
    percent=st.integers(0, 95),
    hub=st.booleans(),
    evicted=st.sampled_from([0, 0, 30]),
)
BEYOND_MERGES = (
    *(
        MergeCase(state, percent, hub, evicted)
        for state, (percent, hub, evicted) in zip(
            BEYOND_TILES, ((50, False, 0), (60, True, 0), (70, False, 20), (80, True, 0), (50, False, 10)), strict=True
        )
    ),
    MergeCase(replace(BEYOND_TILES[-1], dtype="bfloat16", seed=8), 90, hub=True),
    MergeCase(StateCase(24, "ties", heads=2, merged=True, spread=100_000, narrow=True), 90, hub=True),
)
"""As BEYOND_TILES, with one cluster of all slots: always tried."""


def run(aggregator: Any, case: MergeCase) -> tuple[KVState, KVState, Assignment]:
    """State before, state after, assignment."""
    state, assignment = case.state.state(), case.assignment()
    after = expect_inputs_unchanged(aggregator, state=state, assignment=assignment)
    expect(isinstance(after, KVState), "a KVState", type(after).__name__)
    for name in ("keys", "values", "degree", "positions"):
        before, now = getattr(state, name), getattr(after, name)
        same = now.shape == before.shape and now.dtype == before.dtype
        expect(same, f"{name} of {before.dtype} {tuple(before.shape)}", f"{now.dtype} {tuple(now.shape)}")
    return state, after, assignment


@law("degrees add up: no token is lost or counted twice, but those that are evicted", merges, always=BEYOND_MERGES)
def conserves_degree(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    members = _member_sums(before.degree, assignment)
    stays = assignment.stays
    expect_same(torch.where(stays, after.degree, 0.0), torch.where(stays, members, 0.0), "degrees of slots that stay")


def _member_sums(degree: Tensor, assignment: Assignment) -> Tensor:
    gone = assignment.evicted
    return torch.zeros_like(degree).scatter_add(-1, assignment.joins.clamp(min=0), degree.masked_fill(gone, 0))


def _mean_holds(name: str, case: MergeCase, before: KVState, after: KVState, assignment: Assignment) -> None:
    x, y = getattr(before, name), getattr(after, name)
    exact = oracles.merged_mean(x, before.degree, assignment)
    largest = x.double().abs().amax(2, keepdim=True).expand(x.shape)
    bound = 2 * sum_bound(largest, case.state.slots, DTYPES[case.state.dtype])
    wide = assignment.stays[..., None]
    expect_same(torch.where(wide, y.double(), 0.0), torch.where(wide, exact, 0.0), name, bound)


@law("the value of a cluster is the degree-weighted mean of its members' values", merges, always=BEYOND_MERGES)
def values_are_weighted_means(aggregator: Any, case: MergeCase) -> None:
    _mean_holds("values", case, *run(aggregator, case))


@law("the key of a cluster is the degree-weighted mean of its members' keys", merges, always=BEYOND_MERGES)
def keys_are_weighted_means(aggregator: Any, case: MergeCase) -> None:
    _mean_holds("keys", case, *run(aggregator, case))


@law("every channel of a merged key or value lies between its members'", merges, always=BEYOND_MERGES)
def stays_inside_the_members(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    for name in ("keys", "values"):
        x, y = getattr(before, name).double(), getattr(after, name).double()
        # Who is evicted counts as staying where it is: nobody looks there.
        own = torch.arange(case.state.slots).expand(assignment.joins.shape)
        wide = torch.where(assignment.evicted, own, assignment.joins)[..., None].expand(x.shape)
        high = torch.full_like(x, -torch.inf).scatter_reduce(2, wide, x, "amax")
        low = torch.full_like(x, torch.inf).scatter_reduce(2, wide, x, "amin")
        slack = 2 * sum_bound(x.abs().amax(2, keepdim=True).expand(x.shape), case.state.slots, DTYPES[case.state.dtype])
        stays = assignment.stays[..., None]
        inside = torch.maximum(torch.minimum(y, high + slack), low - slack)
        expect_same(torch.where(stays, y, 0.0), torch.where(stays, inside, 0.0), f"{name} within their members'")


@law("slots that nothing joined come out bit-identical", merges, always=BEYOND_MERGES)
def untouched_slots_are_identical(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    alone = assignment.stays & (_member_sums(torch.ones_like(before.degree), assignment) == 1)
    for name in ("keys", "values", "degree", "positions"):
        x, y = getattr(before, name), getattr(after, name)
        expect_same(y[alone], x[alone], f"{name} of slots that nothing joined")


@law("the slot that stays keeps its position", merges, always=BEYOND_MERGES)
def positions_are_the_targets(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    kept = assignment.stays
    expect_same(after.positions[kept], before.positions[kept], "positions of the slots that stay")


@law("what belongs to one row and head is merged there alone", merges, always=BEYOND_MERGES[:4])
def rows_and_heads_merge_alone(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    other = case.state.other()
    for row, head in {(0, 0), (before.batch - 1, before.heads - 1)}:
        mine = torch.zeros(before.batch, before.heads, dtype=torch.bool)
        mine[row, head] = True
        for changed, still in ((mine, ~mine), (~mine, mine)):
            now = aggregator(mixed(before, other, changed), assignment)
            stays = assignment.stays & still[..., None]
            for name in ("keys", "values", "degree"):
                text = f"{name} of rows and heads that did not change"
                expect_same(getattr(now, name)[stays], getattr(after, name)[stays], text)


@law("slot data of the slots that stay, head data, rotation and tokens seen are carried on", merges)
def carries_the_rest_on(aggregator: Any, case: MergeCase) -> None:
    before, assignment = case.state.state(), case.assignment()
    pair = before.positions[..., None] * torch.tensor([1.0, -0.5])
    before = replace(before, slot_data={"place": before.positions.clone(), "pair": pair})
    after = aggregator(before, assignment)
    expect(after.slot_data.keys() >= before.slot_data.keys(), "slot data 'place' and 'pair'", list(after.slot_data))
    for name, data in before.slot_data.items():
        now, stays = after.slot_data[name], assignment.stays
        expect_same(now[stays], data[stays], f"slot_data[{name!r}] of the slots that stay")
    for name, data in before.head_data.items():
        expect(name in after.head_data, f"head data {name!r}", list(after.head_data))
        expect_same(after.head_data[name], data, f"head_data[{name!r}]")
    expect(after.rotary is before.rotary, "the state's rotary", after.rotary)
    expect_same(after.seen, before.seen, "tokens seen")


@law("the same input gives the same result, bit for bit, whatever was merged in between", merges,
     first=(MergeCase(StateCase(20, heads=2, size=4, seed=7)),))  # fmt: skip
def remembers_nothing(aggregator: Any, case: MergeCase) -> None:
    longer = replace(case, state=replace(case.state, slots=case.state.slots + 13, seed=case.state.seed + 1))

    def ask(stage: Any, which: MergeCase) -> Any:
        _, after, assignment = run(stage, which)
        return [getattr(after, name)[assignment.stays] for name in ("keys", "values", "degree", "positions")]

    expect_no_memory(aggregator, ask, [case, longer, case])


@law("merging in two steps equals merging at once", merges, always=BEYOND_MERGES)
def two_steps_equal_one(aggregator: Any, case: MergeCase) -> None:
    case = replace(case, evicted=0)  # who is evicted in the first step has no place to be in the second
    before, at_once, assignment = run(aggregator, case)
    index = torch.arange(case.state.slots)
    half = torch.where(index % 2 == 0, assignment.joins, index)  # first the even slots leave, then the odd ones
    half = torch.where(assignment.stays, index, half)
    rest = torch.where(index % 2 == 1, assignment.joins, index)
    after = aggregator(aggregator(before, Assignment(half)), Assignment(torch.where(assignment.stays, index, rest)))
    stays = assignment.stays
    expect_same(after.degree[stays], at_once.degree[stays], "degrees")
    expect_merged_close(case, before, at_once, after, stays, roundings=3)


def expect_merged_close(
    case: MergeCase, before: KVState, wanted: KVState, got: KVState, stays: Tensor, roundings: int
) -> None:
    """Keys and values of the slots that stay, equal up to ``roundings`` times the bound of one weighted mean."""
    for name in ("keys", "values"):
        x, y = getattr(wanted, name).double(), getattr(got, name).double()
        largest = getattr(before, name).double().abs().amax(2, keepdim=True).expand(x.shape)
        bound = roundings * sum_bound(largest, case.state.slots, DTYPES[case.state.dtype])
        expect_same(y[stays], x[stays], name, bound[stays])


AGGREGATOR_LAWS = (
    remembers_nothing,
    conserves_degree,
    values_are_weighted_means,
    stays_inside_the_members,
    untouched_slots_are_identical,
    positions_are_the_targets,
    rows_and_heads_merge_alone,
    carries_the_rest_on,
    two_steps_equal_one,
)


def check_aggregator(aggregator: Any, examples: int | None = None, *, averages_keys: bool = True) -> None:
    """Check an aggregator against every law of its family; ``averages_keys=False`` if keys are not averaged.

    >>> from centroidkv.aggregate import DegreeWeightedMean
    >>> check_aggregator(DegreeWeightedMean(), examples=10)
    """
    check_all(AGGREGATOR_LAWS + ((keys_are_weighted_means,) if averages_keys else ()), aggregator, examples)
