"""Laws of storages: how compressed states are held between two steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.cache.storage import Held, Storage, as_storage
from centroidkv.state import KVState
from centroidkv.testing.axes import mixed
from centroidkv.testing.law import check_all, expect, expect_same, law
from centroidkv.testing.memory import alike, expect_no_memory, snapshot
from centroidkv.testing.strategies import BEYOND_TILES, KINDS, StateCase

CPU = torch.device("cpu")
Error = Callable[[KVState], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kept:
    """A storage, and how far what comes back may be from what went in (None: not at all)."""

    storage: Any
    error: Error | None = None

    @cached_property
    def whole(self) -> Storage:
        """The storage with what it may leave out."""
        return as_storage(self.storage)

    def __repr__(self) -> str:
        return repr(self.storage)


def one_row(case: StateCase) -> KVState:
    """The state of a case as a cache gives it to a storage: one row of a larger tensor, with data of its slots."""
    state = case.state()
    row = state.batch - 1
    pair = state.positions[..., None] * torch.tensor([1.0, -0.5])
    state = replace(state, rounds=case.seed % 700, slot_data={"pair": pair})
    return state.map_slots(
        lambda x: x[row : row + 1],
        seen=state.seen[row : row + 1],
        head_data={name: data[row : row + 1] for name, data in state.head_data.items()},
    )


cases = st.builds(
    StateCase,
    slots=st.integers(1, 40),
    kind=st.sampled_from([kind for kind in KINDS if kind != "extreme"]),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    size=st.sampled_from([2, 3, 8]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    merged=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 999),
    values=st.sampled_from([1, 3, 5]),
    gaps=st.booleans(),
    narrow=st.booleans(),
)


@law("what comes back is what was put: exactly, or within the error that is allowed to keys and values", cases,
     always=BEYOND_TILES)  # fmt: skip
def gives_back_what_was_put(kept: Kept, case: StateCase) -> None:
    state = one_row(case)
    held = kept.whole.put(state)
    expect(isinstance(held, Held), "a Held", type(held).__name__)
    back = kept.whole.get(held, CPU)
    expect(isinstance(back, KVState), "a KVState", type(back).__name__)
    errors = (None, None) if kept.error is None else kept.error(state)
    for name, bound in zip(("keys", "values"), errors, strict=True):
        before, now = getattr(state, name), getattr(back, name)
        expect(now.dtype == before.dtype, f"{name} of {before.dtype}", now.dtype)
        expect_same(now, before, name, bound)
    for name in ("degree", "positions", "seen", "rounds", "slot_data", "head_data"):
        before, now = snapshot(getattr(state, name)), snapshot(getattr(back, name))
        expect(alike(before, now), f"{name} as it was put: {before}", now)


@law("what is held owns its memory, no more of it than it says, and JSON can say its facts", cases,
     always=BEYOND_TILES[:3])  # fmt: skip
def owns_its_memory(kept: Kept, case: StateCase) -> None:
    held = kept.whole.put(one_row(case))
    for name, tensor in held.tensors.items():
        behind = tensor.untyped_storage().nbytes()
        expect(
            behind <= tensor.nbytes, f"{tensor.nbytes} bytes behind {name!r}", f"{behind}: a view keeps the rest alive"
        )
    facts = dict(held.facts)
    expect(json.loads(json.dumps(facts)) == facts, "facts that JSON can say (lists, not tuples)", facts)
    expect(
        held.nbytes == sum(tensor.nbytes for tensor in held.tensors.values()), "the bytes of its tensors", held.nbytes
    )


@law("getting uses nothing up and writes to nothing: not to what is held, not to what was put", cases)
def getting_changes_nothing(kept: Kept, case: StateCase) -> None:
    state = one_row(case)
    before = snapshot(state)
    held = kept.whole.put(state)
    expect(alike(before, snapshot(state)), "the state as it was before put", "another one")
    inside = snapshot(dict(held.tensors)), dict(held.facts)
    first = snapshot(kept.whole.get(held, CPU))
    expect(alike(inside, (snapshot(dict(held.tensors)), dict(held.facts))), "what is held to stay", "it changed")
    expect(alike(first, snapshot(kept.whole.get(held, CPU))), "the same state again", "another one")


@law("what was fetched, or rested after a file, is read as what was held", cases, always=BEYOND_TILES[2:4])
def fetched_and_rested_are_read_alike(kept: Kept, case: StateCase) -> None:
    held = kept.whole.put(one_row(case))
    wanted = snapshot(kept.whole.get(held, CPU))
    for what, other in (
        ("fetched", kept.whole.fetch(held, CPU)),
        ("rested", kept.whole.rest(Held(dict(held.tensors), json.loads(json.dumps(dict(held.facts)))), CPU)),
        ("copied", held.map(torch.clone)),
    ):
        expect(isinstance(other, Held), f"what was {what} to be a Held", type(other).__name__)
        expect(alike(wanted, snapshot(kept.whole.get(other, CPU))), f"the same of what was {what}", "another state")


@law("what is held depends on the state alone, whatever was put before; and of a head on that head alone", cases,
     first=(StateCase(30, heads=2, size=4, seed=7),), always=BEYOND_TILES[:1])  # fmt: skip
def remembers_nothing(kept: Kept, case: StateCase) -> None:
    longer = replace(case, slots=case.slots + 70, seed=case.seed + 1)

    def ask(one: Kept, which: StateCase) -> Any:
        held = one.whole.put(one_row(which))
        return dict(held.tensors), dict(held.facts), one.whole.get(held, CPU)

    expect_no_memory(kept, ask, [case, longer, case])
    state, other = one_row(case), one_row(replace(case, seed=case.seed + 700))
    mine = torch.zeros(1, state.heads, dtype=torch.bool)
    mine[0, -1] = True
    base = kept.whole.get(kept.whole.put(state), CPU)
    now = kept.whole.get(kept.whole.put(mixed(state, other, ~mine)), CPU)
    for name in ("keys", "values"):
        expect_same(getattr(now, name)[mine], getattr(base, name)[mine], f"{name} of a head when others change")


@law("two states put one after the other are both there", cases)
def states_are_kept_apart(kept: Kept, case: StateCase) -> None:
    one, two = one_row(case), one_row(replace(case, slots=case.slots + 3, seed=case.seed + 1))
    alone = [snapshot(kept.whole.get(kept.whole.put(state), CPU)) for state in (one, two)]
    held = [kept.whole.put(state) for state in (one, two)]
    both = [snapshot(kept.whole.get(each, CPU)) for each in held]
    expect(alike(alone, both), "each of two states as if it were the only one", "something else")


@law("form is a text that stays the same", st.just(None), first=(None,))
def form_is_a_name(kept: Kept, case: None) -> None:
    form = kept.whole.form
    expect(isinstance(form, str) and form, "a text", f"{form!r}")
    kept.whole.put(one_row(StateCase(9)))
    expect(kept.whole.form == form, f"{form!r} again", lambda: kept.whole.form)


STORAGE_LAWS = (
    remembers_nothing,
    gives_back_what_was_put,
    owns_its_memory,
    getting_changes_nothing,
    fetched_and_rested_are_read_alike,
    states_are_kept_apart,
    form_is_a_name,
)


def check_storage(storage: Any, examples: int | None = None, *, error: Error | None = None) -> None:
    """Check a storage (an object with ``put`` and ``get``; the rest is optional) against every law of its family.

    Args:
        storage: the storage.
        examples: tries per law.
        error: of a storage that rounds, the largest errors that it promises: ``state -> (keys', values')``, shaped
            like the state's. None: bit by bit.

    >>> from centroidkv.cache import Exact
    >>> check_storage(Exact(), examples=10)
    """
    check_all(STORAGE_LAWS, Kept(storage, error), examples)
