"""Laws of whole compressors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume
from torch import Tensor

from centroidkv.attention import degree_attention
from centroidkv.errors import BudgetNotMetWarning
from centroidkv.state import KVState
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.strategies import StateCase, states
from centroidkv.testing.tolerances import attention_bound, roundoff

PARTS = ("keys", "values", "degree", "positions")
dense = states(most=90)
short = states(most=40)


def run(compressor: Any, case: StateCase, state: KVState | None = None) -> KVState:
    """Compress a case; rows whose budget cannot hold what is preserved stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetNotMetWarning)
        state = case.state() if state is None else state
        if getattr(compressor, "needs_rotary", False):
            assume(state.rotary is not None)
        return compressor(state, strict=False)


def _exact(compressor: Any) -> bool:
    return getattr(compressor.matching, "exact", True)


@law("the result has the length that the plan says, as many rounds, and never more than the budget if that fits", dense)
def length_equals_the_plan(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    for row, seen in enumerate(state.seen.tolist()):
        if not compressor.fits(seen, case.slots):
            continue
        plan = compressor.plan(seen, case.slots)
        live = smaller.live[row].sum(-1)
        good = (live == plan.final).all() if _exact(compressor) else (live >= plan.final).all()
        expect(good, f"{plan.final} slots in row {row}: {plan}", live.tolist())


@law("degrees add up to the tokens seen, unless some are evicted", dense)
def conserves_degree(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    total, before = smaller.degree.sum(-1), state.degree.sum(-1)
    good = (total <= before).all() if getattr(compressor.matching, "evicts", False) else total.equal(before)
    expect(good, f"{before.tolist()}", total.tolist())
    expect(smaller.seen.equal(state.seen), f"seen = {state.seen.tolist()}", smaller.seen.tolist())


@law("slots stay in order, and every position was there before", dense)
def keeps_order(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    live = smaller.live
    steps = smaller.positions.diff(dim=-1)
    both = live[..., 1:] & live[..., :-1]
    expect((steps[both] > 0).all(), "ascending positions", smaller.positions.tolist())
    known = (smaller.positions[..., None] == state.positions[..., None, :]).any(-1)
    expect((known | ~live).all(), "positions of input slots", smaller.positions.tolist())


@law("preserved slots come out bit-identical", dense)
def preserved_slots_are_identical(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    for row, seen in enumerate(state.seen.tolist()):
        budget = compressor.budget.slots(seen)
        if state.slots <= budget or not compressor.fits(seen, state.slots):
            continue
        one = state.rows(torch.tensor([row]))
        mask = compressor.preservers.select(one, budget)[0]
        count = compressor.preservers.count(state.slots, budget)
        expect((mask.sum(-1) == count).all(), f"{count} preserved slots per head", mask.sum(-1).tolist())
        for head in range(state.heads):
            kept = one.positions[0, head, mask[head]]
            place = (smaller.positions[row, head] == kept[:, None]) & smaller.live[row, head]
            expect((place.sum(-1) == 1).all(), f"positions {kept.tolist()} to be kept", smaller.positions[row, head])
            for name in PARTS:
                before, after = getattr(one, name)[0, head, mask[head]], getattr(smaller, name)[row, head]
                after = after[place.byte().argmax(-1)]
                expect(after.equal(before), f"{name} of preserved slots unchanged", (before, after))


@law("a state within its budget comes back unchanged", short)
def within_budget_nothing_changes(compressor: Any, case: StateCase) -> None:
    state = case.state()
    assume(bool((state.seen.clamp(min=1) >= state.slots).all()))
    assume(all(compressor.budget.slots(seen) >= state.slots for seen in state.seen.tolist()))
    _expect_equal(run(compressor, case, state), state, "the input")


@law("the input is not modified", short)
def leaves_its_input_alone(compressor: Any, case: StateCase) -> None:
    state = case.state()
    before = state.map_slots(torch.clone)
    run(compressor, case, state)
    _expect_equal(state, before, "the input as it was")


@law("the same input gives the same output, bit for bit, whatever was compressed in between", short)
def is_deterministic_and_stateless(compressor: Any, case: StateCase) -> None:
    first = run(compressor, case)
    run(compressor, replace(case, slots=case.slots + 7, seed=case.seed + 1))
    _expect_equal(run(compressor, case), first, "the first result")


@law("permuting rows or heads permutes the result", short)
def permuting_rows_and_heads_commutes(compressor: Any, case: StateCase) -> None:
    state = case.state()
    rows = torch.arange(state.batch).flip(0)
    after = run(compressor, case, state).rows(rows)
    _expect_equal(run(compressor, case, state.rows(rows)), after, "the permuted result", _slack(case))
    if getattr(compressor.similarity, "heads", "each") == "mean":
        return  # a mean over heads may round differently in another order
    flipped = state.map_slots(lambda x: x.flip(1), head_data={k: x.flip(1) for k, x in state.head_data.items()})
    after = run(compressor, case, state).map_slots(lambda x: x.flip(1))
    _expect_equal(run(compressor, case, flipped), after, "the result with heads permuted", _slack(case))


@law("a padded row comes out as its own unpadded run", states(most=60, padded=True))
def padding_does_not_matter(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    for row in range(state.batch):
        skip = min(case.pad[row], state.slots) if row < len(case.pad) else 0
        own = _last_slots(state.rows(torch.tensor([row])), state.slots - skip)
        alone = run(compressor, case, own)
        width = smaller.slots - alone.slots
        mine = _last_slots(smaller.rows(torch.tensor([row])), alone.slots)
        _expect_equal(mine, alone, f"row {row} as its own run", _slack(case))
        empty = smaller.degree[row, :, :width]
        expect(not empty.any(), f"{width} empty slots before row {row}", empty.tolist())


@law("merging tokens that share one key leaves attention as it was, whatever their values", states(
    most=60, kinds=("equal",), dtypes=("float32", "float64")))  # fmt: skip
def merging_equal_keys_leaves_attention(compressor: Any, case: StateCase) -> None:
    if getattr(compressor.matching, "evicts", False):
        return
    state = case.state()
    assume(state.slots > 0)
    smaller = run(compressor, case, state)
    query = torch.randn(case.batch, case.heads, 1, case.size, generator=case.generator()).to(state.keys.dtype)

    def attend(s: KVState) -> Tensor:
        return degree_attention(query, s.keys, s.values, s.degree, causal=False, backend="reference")

    before, after = attend(state), attend(smaller)
    bound = 4 * attention_bound(query, state.keys, state.values, smaller.degree, case.size**-0.5)
    expect((before - after).abs().max() <= bound, f"{before.tolist()}", after.tolist())


COMPRESSOR_LAWS = (
    length_equals_the_plan,
    conserves_degree,
    keeps_order,
    preserved_slots_are_identical,
    within_budget_nothing_changes,
    leaves_its_input_alone,
    is_deterministic_and_stateless,
    permuting_rows_and_heads_commutes,
    padding_does_not_matter,
    merging_equal_keys_leaves_attention,
)


def _last_slots(state: KVState, count: int) -> KVState:
    return state.map_slots(lambda x: x[:, :, state.slots - count :])


def _slack(case: StateCase) -> float:
    """Batched products of other shapes may round differently; what follows is the same to rounding or a tie."""
    return 0.0 if case.kind in ("ties", "equal", "duplicates", "zeros") else roundoff(torch.float32) * 64


def _expect_equal(got: KVState, wanted: KVState, what: str, slack: float = 0.0) -> None:
    for name in PARTS:
        x, y = getattr(wanted, name), getattr(got, name)
        same = x.shape == y.shape and (
            torch.equal(x.nan_to_num(0.0), y.nan_to_num(0.0))
            or bool(slack and torch.allclose(x.double(), y.double(), rtol=slack, atol=slack, equal_nan=True))
        )
        expect(same, f"{name} of {what}: {x.tolist()}", y.tolist())


def check_compressor(compressor: Any, examples: int | None = None) -> None:
    """Check a compressor against every law of its family.

    Use small preserved counts and chunks (a few slots), as the laws' states have at most 90 slots.

    >>> from centroidkv import Compressor
    >>> from centroidkv.preserve import Recent, Sinks
    >>> check_compressor(Compressor.builder().preserve(Sinks(1), Recent(2)).budget(0.5).build(), examples=5)
    """
    check_all(COMPRESSOR_LAWS, compressor, examples)
