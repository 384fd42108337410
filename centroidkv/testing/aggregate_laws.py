"""Laws of aggregators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.records import Assignment
from centroidkv.state import KVState
from centroidkv.testing import oracles
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.strategies import DTYPES, KINDS, StateCase, states
from centroidkv.testing.tolerances import sum_bound


@dataclass(frozen=True)
class MergeCase:
    """A state and a random assignment in which about ``percent`` per cent of the slots leave."""

    state: StateCase
    percent: int = 50
    hub: bool = False

    def assignment(self) -> Assignment:
        """Random leavers, each joining a random slot that stays (``hub``: all joining the same one)."""
        case, generator = self.state, self.state.generator()
        shape = (case.batch, case.heads, case.slots)
        leaves = torch.rand(shape, generator=generator) * 100 < self.percent
        joins = torch.arange(case.slots).expand(shape).clone()
        for b in range(case.batch):
            for h in range(case.heads):
                stay = (~leaves[b, h]).nonzero().flatten()
                if not len(stay):
                    continue
                out = leaves[b, h].nonzero().flatten()
                pick = torch.randint(1 if self.hub else len(stay), (len(out),), generator=generator)
                joins[b, h, out] = stay[pick]
        return Assignment(joins)


MILD = tuple(kind for kind in KINDS if kind != "extreme")
merges = st.builds(
    MergeCase,
    state=states(least=1, most=24, dtypes=("float32", "bfloat16", "float16"), kinds=MILD),
    percent=st.integers(0, 95),
    hub=st.booleans(),
)


def run(aggregator: Any, case: MergeCase) -> tuple[KVState, KVState, Assignment]:
    """State before, state after, assignment."""
    state, assignment = case.state.state(), case.assignment()
    return state, aggregator(state, assignment), assignment


@law("degrees add up: no token is lost or counted twice", merges)
def conserves_degree(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    total = torch.where(assignment.stays, after.degree, 0.0).sum(-1)
    expect(after.degree.dtype == torch.float32, "float32 degrees", after.degree.dtype)
    expect(total.equal(before.degree.sum(-1)), f"{before.degree.sum(-1).tolist()} tokens", total.tolist())
    members, stays = _member_sums(before.degree, assignment), assignment.stays
    expect(after.degree[stays].equal(members[stays]), f"{members.tolist()}", after.degree.tolist())


def _member_sums(degree: Tensor, assignment: Assignment) -> Tensor:
    return torch.zeros_like(degree).scatter_add(-1, assignment.joins, degree)


def _mean_holds(name: str, case: MergeCase, before: KVState, after: KVState, assignment: Assignment) -> None:
    x, y = getattr(before, name), getattr(after, name)
    exact = oracles.merged_mean(x, before.degree, assignment)
    largest = x.double().abs().amax(2, keepdim=True).expand(x.shape)
    bound = 2 * sum_bound(largest, case.state.slots, DTYPES[case.state.dtype])
    stays = assignment.stays
    good = (y.double() - exact).abs()[stays] <= bound[stays]
    expect(good.all(), f"{name} {exact[stays].tolist()}", lambda: y[stays].tolist())


@law("the value of a cluster is the degree-weighted mean of its members' values", merges)
def values_are_weighted_means(aggregator: Any, case: MergeCase) -> None:
    _mean_holds("values", case, *run(aggregator, case))


@law("the key of a cluster is the degree-weighted mean of its members' keys", merges)
def keys_are_weighted_means(aggregator: Any, case: MergeCase) -> None:
    _mean_holds("keys", case, *run(aggregator, case))


@law("every channel of a merged key or value lies between its members'", merges)
def stays_inside_the_members(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    for name in ("keys", "values"):
        x, y = getattr(before, name).double(), getattr(after, name).double()
        wide = assignment.joins[..., None].expand(x.shape)
        high = torch.full_like(x, -torch.inf).scatter_reduce(2, wide, x, "amax")
        low = torch.full_like(x, torch.inf).scatter_reduce(2, wide, x, "amin")
        slack = 2 * sum_bound(x.abs().amax(2, keepdim=True).expand(x.shape), case.state.slots, DTYPES[case.state.dtype])
        good = ((y <= high + slack) & (y >= low - slack))[assignment.stays]
        expect(good.all(), f"{name} between {low.tolist()} and {high.tolist()}", lambda y=y: y.tolist())


@law("slots that nothing joined come out bit-identical", merges)
def untouched_slots_are_identical(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    members = torch.zeros_like(before.degree).scatter_add(-1, assignment.joins, torch.ones_like(before.degree))
    alone = assignment.stays & (members == 1)
    for name in ("keys", "values", "degree", "positions"):
        x, y = getattr(before, name), getattr(after, name)
        expect(y[alone].equal(x[alone]), f"{name} unchanged at lone slots", lambda y=y: y[alone].tolist())


@law("the slot that stays keeps its position", merges)
def positions_are_the_targets(aggregator: Any, case: MergeCase) -> None:
    before, after, assignment = run(aggregator, case)
    kept = after.positions[assignment.stays]
    expect(kept.equal(before.positions[assignment.stays]), "positions of the slots that stay", kept.tolist())


@law("merging in two steps equals merging at once", merges)
def two_steps_equal_one(aggregator: Any, case: MergeCase) -> None:
    before, at_once, assignment = run(aggregator, case)
    index = torch.arange(case.state.slots)
    half = torch.where(index % 2 == 0, assignment.joins, index)  # first the even slots leave, then the odd ones
    half = torch.where(assignment.stays, index, half)
    rest = torch.where(index % 2 == 1, assignment.joins, index)
    after = aggregator(aggregator(before, Assignment(half)), Assignment(torch.where(assignment.stays, index, rest)))
    stays = assignment.stays
    expect(after.degree[stays].equal(at_once.degree[stays]), f"{at_once.degree.tolist()}", after.degree.tolist())
    expect_merged_close(case, before, at_once, after, stays, roundings=3)


def expect_merged_close(
    case: MergeCase, before: KVState, wanted: KVState, got: KVState, stays: Tensor, roundings: int
) -> None:
    """Keys and values of the slots that stay, equal up to ``roundings`` times the bound of one weighted mean."""
    for name in ("keys", "values"):
        x, y = getattr(wanted, name).double(), getattr(got, name).double()
        largest = getattr(before, name).double().abs().amax(2, keepdim=True).expand(x.shape)
        bound = roundings * sum_bound(largest, case.state.slots, DTYPES[case.state.dtype])
        expect(((x - y).abs() <= bound)[stays].all(), f"{name} {x[stays].tolist()}", lambda y=y: y[stays].tolist())


AGGREGATOR_LAWS = (
    conserves_degree,
    values_are_weighted_means,
    stays_inside_the_members,
    untouched_slots_are_identical,
    positions_are_the_targets,
    two_steps_equal_one,
)


def check_aggregator(aggregator: Any, examples: int | None = None, *, averages_keys: bool = True) -> None:
    """Check an aggregator against every law of its family; ``averages_keys=False`` if keys are not averaged.

    >>> from centroidkv.aggregate import DegreeWeightedMean
    >>> check_aggregator(DegreeWeightedMean(), examples=10)
    """
    check_all(AGGREGATOR_LAWS + ((keys_are_weighted_means,) if averages_keys else ()), aggregator, examples)
