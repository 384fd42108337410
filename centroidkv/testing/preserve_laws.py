"""Laws of preservers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.state import KVState
from centroidkv.testing.axes import expect_rows_and_heads_apart
from centroidkv.testing.law import check_all, expect, expect_same, given_that, law
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory
from centroidkv.testing.prepare_laws import declared_only, expect_readable
from centroidkv.testing.strategies import BEYOND_TILES, StateCase, states
from centroidkv.traits import PreserverTraits


@dataclass(frozen=True)
class PreserveCase:
    """A state, how many of its slots others have taken already, and the free budget, in hundredths of its slots."""

    state: StateCase
    taken: int = 25
    budget: int = 50

    def free(self) -> Tensor:
        """The free slots ``[B, H, T]``: as many in every row and head, but not the same ones."""
        case = self.state
        draw = torch.rand(case.batch, case.heads, case.slots, generator=case.generator())
        return draw.argsort(-1).argsort(-1) >= case.slots * self.taken // 100


@dataclass(frozen=True, repr=False)
class OfFunction:
    """A plain function ``state -> mask`` with the methods of a preserver; it says by its mask how many it wants."""

    function: Callable[[KVState], Tensor]
    share = None
    counted = False

    def select(self, state: KVState, free: Tensor, count: int) -> Tensor:
        return self.function(state)

    def __repr__(self) -> str:
        return repr(self.function)


cases = st.builds(PreserveCase, states(least=1, most=30, gaps=True), st.sampled_from([0, 25, 80]), st.integers(0, 100))
ALWAYS = tuple(PreserveCase(state, taken, 40) for state, taken in zip(BEYOND_TILES, (0, 25, 10, 30, 25), strict=True))


def run(preserver: Any, case: PreserveCase, state: KVState | None = None) -> tuple[Tensor, Tensor, int | None]:
    """The mask chosen, the slots that were free, and how many were asked for (None: a function, which decides)."""
    state = declared_only(preserver, case.state.state()) if state is None else state
    free = case.free()
    if not PreserverTraits.of(preserver).counted:
        free, count = torch.ones_like(free), None
    else:
        count = min(int(preserver.count(case.state.slots * case.budget // 100)), int(free[0, 0].sum()))
    # A function is asked for nothing; what it is given in place of a number does not matter.
    chosen = expect_inputs_unchanged(preserver.select, state=state, free=free, count=count or 0)
    expect(isinstance(chosen, Tensor) and chosen.dtype == torch.bool, "a bool mask [B, H, T]", chosen)
    expect(chosen.shape == free.shape, f"a mask of shape {tuple(free.shape)}", tuple(chosen.shape))
    return chosen, free, count


@law("exactly the slots asked for are chosen in every row and head, all of them free", cases, always=ALWAYS)
def chooses_that_many_free_slots(preserver: Any, case: PreserveCase) -> None:
    # A function cannot know what is free, nor how many slots heads hold that were merged apart.
    given_that(PreserverTraits.of(preserver).counted or not case.state.gaps)
    mask, free, count = run(preserver, case)
    number = mask.sum(-1)
    if count is None:
        count = int(number.flatten()[0])
    expect_same(number, torch.full_like(number, count), "slots chosen in every row and head")
    expect_same((mask & ~free).sum(-1), torch.zeros_like(number), "slots chosen that were not free")


@law("what a row and head keeps depends on its own content, unless pools_heads says that heads look at each other",
     cases, always=ALWAYS)  # fmt: skip
def rows_and_heads_choose_alone(preserver: Any, case: PreserveCase) -> None:
    state = declared_only(preserver, case.state.state())
    pools = bool(PreserverTraits.of(preserver).pools_heads)
    expect_rows_and_heads_apart(
        lambda one: (run(preserver, case, one)[0],), state, case.state.other(), "the choice", pools=pools
    )


# Of other kinds rounding, which may differ between places in memory, decides between equal or nearly equal slots.
plain = st.builds(PreserveCase, states(least=1, most=30, dtypes=("float32",), kinds=("gaussian",)), st.just(0))


@law("moving rows moves their choices with them, and so for heads", plain,
     always=[replace(case, taken=0) for case in ALWAYS[:3]])  # fmt: skip
def rows_and_heads_are_treated_alike(preserver: Any, case: PreserveCase) -> None:
    state = declared_only(preserver, case.state.state())
    mask = run(preserver, case, state)[0]
    for axis in (0, 1):
        head_data = {name: data.flip(axis) for name, data in state.head_data.items()}
        seen = state.seen.flip(0) if axis == 0 else state.seen
        moved = state.map_slots(lambda x, axis=axis: x.flip(axis), head_data=head_data, seen=seen)  # type: ignore[misc]
        expect_same(run(preserver, case, moved)[0], mask.flip(axis), f"the choice with {('rows', 'heads')[axis]} moved")


@law("the same input gives the same choice, whatever was asked in between", cases,
     first=(PreserveCase(StateCase(20, heads=2, size=4, seed=7)), PreserveCase(BEYOND_TILES[2])))  # fmt: skip
def remembers_nothing(preserver: Any, case: PreserveCase) -> None:
    longer = replace(case, state=replace(case.state, slots=case.state.slots + 13, seed=case.state.seed + 1))
    more = replace(case, state=replace(case.state, batch=case.state.batch + 1), budget=20)
    expect_no_memory(preserver, lambda stage, which: run(stage, which)[0], [case, longer, case, more])


@law("it says of itself what is read, in words that exist", st.just(None))
def declares_what_exists(preserver: Any, case: None) -> None:
    expect_readable(preserver, PreserverTraits)


@law("it looks at rotations and queries only if needs_rotary or needs_queries says so", cases)
def needs_only_what_it_says(preserver: Any, case: PreserveCase) -> None:
    given_that(case.state.size % 2 == 0)
    mask = run(preserver, case)[0]  # of a state without what was not asked for
    expect_same(run(preserver, case, case.state.state())[0], mask, "the choice where there is more to know")


@law("counts are whole numbers that do not fall when the budget grows; of a share about that share and never more than "
     "the budget; of a fixed number the same for every budget",
     st.lists(st.integers(0, 3000), min_size=2, max_size=8),
     first=(range(300), [*range(1000, 1100), 2047, 2048, 2049, 5000, 10**5, 10**6]))  # fmt: skip
def counts_are_sound(preserver: Any, budgets: Any) -> None:
    budgets = sorted(budgets)
    counts: list[Any] = [preserver.count(budget) for budget in budgets]
    whole = all(isinstance(count, Integral) and not isinstance(count, bool) for count in counts) and min(counts) >= 0
    expect(whole, "whole numbers >= 0", counts)
    expect(counts == sorted(counts), "counts that do not fall", counts)
    again = [preserver.count(budget) for budget in reversed(budgets)][::-1]
    expect(counts == again, f"{counts} again", again)
    share: Any = preserver.share
    expect(share == preserver.share, f"a share of {share} again", lambda: preserver.share)
    if share is None:
        expect(len(set(counts)) == 1, "one count for every budget, as share is None", counts)
        return
    expect(isinstance(share, Real), "a share in (0, 1]", share)
    expect(0 < float(share) <= 1, "a share in (0, 1]", share)
    for budget, count in zip(budgets, counts, strict=True):
        expect(count <= budget, f"at most the budget of {budget}", count)
        expect(count < share * budget + 1, f"at most {share} of {budget}", count)
        # Rounding to blocks is no lie, taking another share is.
        expect(count >= 0.99 * share * budget - 256, f"about {share} of {budget}", count)


PRESERVER_LAWS = (
    remembers_nothing,
    counts_are_sound,
    chooses_that_many_free_slots,
    rows_and_heads_choose_alone,
    rows_and_heads_are_treated_alike,
    needs_only_what_it_says,
    declares_what_exists,
)


def check_preserver(preserver: Any, examples: int | None = None) -> None:
    """Check a preserver against every law of its family.

    Args:
        preserver: an object with ``share``, ``count`` and ``select``, or a plain function ``state -> mask``.
        examples: tries per law.

    >>> from centroidkv.preserve import Sinks
    >>> check_preserver(Sinks(2), examples=10)
    >>> check_preserver(lambda state: state.positions < 0, examples=10)
    """
    if callable(preserver) and not (hasattr(preserver, "select") and hasattr(preserver, "count")):
        laws = [one for one in PRESERVER_LAWS if one is not counts_are_sound]
        return check_all(laws, OfFunction(preserver), examples)
    return check_all(PRESERVER_LAWS, preserver, examples)
