"""Laws of whole compressors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.attention import degree_attention
from centroidkv.errors import BudgetNotMetWarning
from centroidkv.state import KVState
from centroidkv.testing.axes import expect_rows_and_heads_apart
from centroidkv.testing.law import check_all, expect, expect_same, given_that, law
from centroidkv.testing.memory import alike, expect_no_memory, snapshot
from centroidkv.testing.strategies import StateCase, states
from centroidkv.testing.tolerances import attention_bound, roundoff
from centroidkv.traits import MatcherTraits, SimilarityTraits

PARTS = ("keys", "values", "degree", "positions")
dense = states(most=90, gaps=True)
short = states(most=40, gaps=True)


def beyond(compressor: Any) -> tuple[StateCase, ...]:
    """Sizes past every tile, block and chunk in use; fewer slots where every slot is compared with every other one."""
    pairs = not MatcherTraits.of(compressor.matching).needs_partition
    return (
        StateCase(150, batch=2, heads=67, size=4, merged=True, seed=1),
        StateCase(300, batch=9, heads=3, size=66, values=70, kind="rotary", strided=True, start=2**24 + 1, seed=2),
        StateCase(400 if pairs else 2500, heads=2, size=8, merged=True, spread=300, gaps=True, seed=3),
    )


def wide(compressor: Any) -> tuple[StateCase, ...]:
    """One case with many slots and channels, for laws that compress several times.

    Of matchers that compare all slots with each other, which cost a hundred times as much, with fewer.
    """
    if not MatcherTraits.of(compressor.matching).needs_partition:
        return (StateCase(270, heads=3, size=66, values=70, seed=4),)
    return (StateCase(600, batch=2, heads=3, size=258, values=260, seed=4),)


def run(compressor: Any, case: StateCase, state: KVState | None = None) -> KVState:
    """Compress a case; rows whose budget cannot hold what is preserved stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetNotMetWarning)
        state = case.state() if state is None else state
        if compressor.needs_rotary:
            given_that(state.rotary is not None)
        return compressor(state, strict=False)


def _exact(compressor: Any) -> bool:
    return MatcherTraits.of(compressor.matching).exact


@law("the result has the length that the plan says, as many rounds, and never more than the budget if that fits", dense,
     always=beyond)  # fmt: skip
def length_equals_the_plan(compressor: Any, case: StateCase) -> None:
    state = replace(case.state(), rounds=case.seed % 5)
    smaller = run(compressor, case, state)
    rounds = 0
    for row, seen in enumerate(state.seen.tolist()):
        if not compressor.fits(seen, case.slots):
            continue
        plan = compressor.plan(seen, case.slots)
        rounds = max(rounds, len(plan.sizes))
        live = smaller.live[row].sum(-1)
        good = (live == plan.final).all() if _exact(compressor) else (live >= plan.final).all()
        expect(good, f"{plan.final} slots in row {row}: {plan}", live)
        expect(not plan.met or plan.final <= max(plan.budget, 0), f"at most {plan.budget} slots", plan.final)
    wanted = state.rounds + rounds if state.batch and state.heads else state.rounds
    expect(smaller.rounds == wanted, f"{wanted} rounds", smaller.rounds)


def _plans(compressor: Any, tokens: int) -> Any:
    """The plan and what else is said about so many tokens, before any is seen."""
    if not compressor.fits(tokens):
        return False
    if not compressor.plannable:
        return True
    plan = compressor.plan(tokens)
    return plan.slots, plan.budget, plan.preserved, plan.sizes


@law("a plan depends on the number of tokens alone, whatever was planned before",
     st.lists(st.integers(0, 400), max_size=4),
     first=([3000, 90, 700, 3000, 5],))  # fmt: skip
def plans_are_repeated(compressor: Any, lengths: list[int]) -> None:
    expect_no_memory(compressor, _plans, lengths)


@law("degrees add up to the tokens seen, unless some are evicted", dense, always=beyond)
def conserves_degree(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    total, before = smaller.degree.sum(-1), state.degree.sum(-1)
    evicts = MatcherTraits.of(compressor.matching).evicts
    expect_same(total, torch.minimum(total, before) if evicts else before, "degrees of every row and head")
    expect_same(smaller.seen, state.seen, "tokens seen")
    expect(smaller.degree.dtype == torch.float32, "float32 degrees", smaller.degree.dtype)


@law("slots stay in order, and every position was there before", dense, always=beyond)
def keeps_order(compressor: Any, case: StateCase) -> None:
    state = case.state()
    smaller = run(compressor, case, state)
    live = smaller.live
    steps = smaller.positions.diff(dim=-1)
    both = live[..., 1:] & live[..., :-1]
    expect((steps[both] > 0).all(), "ascending positions", smaller.positions)
    found = torch.searchsorted(state.positions.contiguous(), smaller.positions.contiguous())
    known = state.positions.gather(-1, found.clamp(max=max(state.slots - 1, 0))) if state.slots else smaller.positions
    expect_same(torch.where(live, smaller.positions, 0), torch.where(live, known, 0), "positions of input slots")


@law("preserved slots come out bit-identical", dense, always=wide)
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
            expect(
                (place.sum(-1) == 1).all(), f"positions {kept[:99].tolist()} to be kept", smaller.positions[row, head]
            )
            for name in PARTS:
                before, after = getattr(one, name)[0, head, mask[head]], getattr(smaller, name)[row, head]
                after = after[place.byte().argmax(-1)]
                expect_same(after, before, f"{name} of preserved slots")


@law("a state within its budget comes back unchanged", short)
def within_budget_nothing_changes(compressor: Any, case: StateCase) -> None:
    state = case.state()
    given_that(bool((state.seen.clamp(min=1) >= state.slots).all()))
    given_that(all(compressor.budget.slots(seen) >= state.slots for seen in state.seen.tolist()))
    _expect_equal(run(compressor, case, state), state, "the input")


@law("the input is not modified, and head data and the data of the slots that stay come back with the result", short,
     always=wide)  # fmt: skip
def leaves_its_input_alone(compressor: Any, case: StateCase) -> None:
    state = case.state()
    state = replace(state, slot_data={"place": state.positions.clone()})
    before = snapshot(state)
    smaller = run(compressor, case, state)
    expect(alike(before, snapshot(state)), "the input as it was", "it was written to")
    same = smaller.slot_data.keys() == state.slot_data.keys() and smaller.head_data.keys() == state.head_data.keys()
    expect(same, "the slot and head data of the input, no more", [*smaller.slot_data, *smaller.head_data])
    live = smaller.live
    expect_same(smaller.slot_data["place"][live], smaller.positions[live], "slot data of the slots that stay")
    for name, data in state.head_data.items():
        expect_same(smaller.head_data[name], data, f"head data {name!r}")
    expect(smaller.rotary is state.rotary, "the same rotary", smaller.rotary)


@law("the same input gives the same output, bit for bit, whatever was compressed in between", short,
     first=(StateCase(500, heads=2, size=4, seed=7),))  # fmt: skip
def is_deterministic_and_stateless(compressor: Any, case: StateCase) -> None:
    longer = replace(case, slots=case.slots + 7, seed=case.seed + 1)
    more = replace(case, batch=case.batch + 1, seed=case.seed + 2)

    def ask(one: Any, which: StateCase) -> Any:
        smaller = run(one, which)
        return [getattr(smaller, name) for name in PARTS], smaller.rounds

    expect_no_memory(compressor, ask, [case, longer, case, more])


@law("a row comes out as it does whatever the others hold; a head likewise, unless pools_heads says that heads look at "
     "each other", states(least=1, most=60), always=wide)  # fmt: skip
def rows_and_heads_are_compressed_alone(compressor: Any, case: StateCase) -> None:
    if not _exact(compressor):
        return  # a head with fewer merges moves the others behind empty slots
    state = replace(case, merged=False).state()

    def parts(one: KVState) -> tuple[Tensor, ...]:
        smaller = run(compressor, case, one)
        return tuple(getattr(smaller, name) for name in PARTS)

    pools = bool(compressor.pools_heads)
    expect_rows_and_heads_apart(parts, state, replace(case, merged=False).other(), "what was kept", pools=pools)


@law("permuting rows or heads permutes the result", short)
def permuting_rows_and_heads_commutes(compressor: Any, case: StateCase) -> None:
    state = case.state()
    rows = torch.arange(state.batch).flip(0)
    after = run(compressor, case, state).rows(rows)
    _expect_equal(run(compressor, case, state.rows(rows)), after, "the permuted result", _slack(case))
    if SimilarityTraits.of(compressor.similarity).heads == "mean":
        return  # a mean over heads may round differently in another order
    flipped = state.map_slots(lambda x: x.flip(1), head_data={k: x.flip(1) for k, x in state.head_data.items()})
    after = run(compressor, case, state).map_slots(lambda x: x.flip(1))
    _expect_equal(run(compressor, case, flipped), after, "the result with heads permuted", _slack(case))


@law("a padded row comes out as its own unpadded run", states(most=60, padded=True),
     always=(StateCase(300, batch=3, heads=3, size=4, pad=(170, 0, 33), seed=5),))  # fmt: skip
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
        expect(not empty.any(), f"{width} empty slots before row {row}", empty)


@law("merging tokens that share one key leaves attention as it was, whatever their values", states(
    most=60, kinds=("equal",), dtypes=("float32", "float64")))  # fmt: skip
def merging_equal_keys_leaves_attention(compressor: Any, case: StateCase) -> None:
    if MatcherTraits.of(compressor.matching).evicts:
        return
    state = case.state()
    given_that(state.slots > 0)
    smaller = run(compressor, case, state)
    query = torch.randn(case.batch, case.heads, 1, case.size, generator=case.generator()).to(state.keys.dtype)

    def attend(s: KVState) -> Tensor:
        return degree_attention(query, s.keys, s.values, s.degree, causal=False, backend="reference")

    before, after = attend(state), attend(smaller)
    bound = 4 * attention_bound(query, state.keys, state.values, smaller.degree, case.size**-0.5)
    expect_same(after, before, "attention", bound)


COMPRESSOR_LAWS = (
    plans_are_repeated,
    is_deterministic_and_stateless,
    length_equals_the_plan,
    conserves_degree,
    keeps_order,
    preserved_slots_are_identical,
    within_budget_nothing_changes,
    leaves_its_input_alone,
    rows_and_heads_are_compressed_alone,
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
        expect_same(y, x, f"{name} of {what}", slack * (1 + x.double().abs().nan_to_num(0.0)) if slack else None)


def check_compressor(compressor: Any, examples: int | None = None) -> None:
    """Check a compressor against every law of its family.

    Use small preserved counts and chunks (a few slots), as most of the laws' states have at most 90 slots.

    >>> from centroidkv import Compressor
    >>> from centroidkv.preserve import Recent, Sinks
    >>> check_compressor(Compressor.builder().preserve(Sinks(1), Recent(2)).budget(0.5).build(), examples=5)
    """
    check_all(COMPRESSOR_LAWS, compressor, examples)
