"""Stages get what they declare and no more: rotations, queries, prepared data. Laws of what they prepare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.queries import QUERIES
from centroidkv.state import KVState
from centroidkv.testing.law import expect, given_that, law
from centroidkv.testing.memory import alike, expect_inputs_unchanged, expect_no_memory, snapshot
from centroidkv.testing.strategies import FAR_AND_HEAVY, MANY_CHANNELS, StateCase, states
from centroidkv.traits import LookingTraits, MatcherTraits, SimilarityTraits, Traits

cases = states(least=1, most=24)


def needs(stage: Any) -> tuple[bool, bool]:
    """Whether a stage says that it needs to know the rotation of keys, and the model's queries."""
    queries = bool(LookingTraits.of(stage).needs_queries)
    rotary = queries or bool(LookingTraits.of(stage).needs_rotary) or SimilarityTraits.of(stage).rope == "before"
    return rotary, queries


def expect_readable(stage: Any, family: type[Traits]) -> None:
    """Within a law: what ``stage`` says of itself is read by someone, and has a value that means something."""
    try:
        family.check(stage)
    except StageError as error:
        expect(False, "attributes that are read, with values they can have", str(error))


def declared_only(stage: Any, state: KVState) -> KVState:
    """``state`` without what the stage does not say it needs; skips states that lack what it does need."""
    rotary, queries = needs(stage)
    given_that(state.rotary is not None or not rotary)
    data = {name: data for name, data in state.head_data.items() if queries or name != QUERIES}
    return replace(state, rotary=state.rotary if rotary else None, head_data=data)


def prepared(stage: Any, state: KVState) -> KVState:
    """``state`` as a compressor would prepare it for the stage, all slots free; with slot data it asks for by name."""
    if LookingTraits.of(stage).prepare is not None:
        state = stage.prepare(state, torch.ones_like(state.live))
    name = MatcherTraits.of(stage).mass
    if name is not None and name not in state.slot_data:
        weight = 0.1 + (torch.arange(state.slots) * 7 % 11).float().expand(state.degree.shape) / 11
        state = replace(state, slot_data={**state.slot_data, name: weight.contiguous()})
    return state


def _free(case: StateCase, state: KVState) -> Tensor:
    free = torch.ones_like(state.live)
    free[..., case.seed % 3 :: 5] = False
    return free


@law("prepare adds slot and head data and changes nothing, nor what it was given", cases,
     always=(FAR_AND_HEAVY, MANY_CHANNELS))  # fmt: skip
def prepare_only_adds(stage: Any, case: StateCase) -> None:
    state = declared_only(stage, case.state())
    mine = torch.arange(case.slots).float().expand(state.degree.shape).contiguous()
    state = replace(state, slot_data={"mine": mine})
    after = expect_inputs_unchanged(stage.prepare, state=state, free=_free(case, state))
    expect(isinstance(after, KVState), "a KVState", type(after).__name__)
    for name in ("keys", "values", "degree", "positions", "seen", "rounds"):
        expect(alike(snapshot(getattr(state, name)), getattr(after, name)), f"{name} as it was", f"other {name}")
    for kind in ("slot_data", "head_data"):
        before, now = getattr(state, kind), getattr(after, kind)
        for name, data in before.items():
            expect(name in now and alike(now[name], data), f"{kind}[{name!r}] as it was", "something else")
    given_that(after.rotary is None or state.rotary is not None)
    expect(after.rotary is state.rotary, "the same rotary", after.rotary)


@law("preparing what is prepared changes nothing", cases)
def prepare_is_idempotent(stage: Any, case: StateCase) -> None:
    state = declared_only(stage, case.state())
    free = _free(case, state)
    once = stage.prepare(state, free)
    expect(alike(snapshot(once), snapshot(stage.prepare(once, free))), "the same state", "another one")


@law("what is prepared depends on the state and the free slots alone", cases)
def prepare_remembers_nothing(stage: Any, case: StateCase) -> None:
    longer = replace(case, slots=case.slots + 9, seed=case.seed + 1)

    def ask(one: Any, which: StateCase) -> Any:
        state = declared_only(one, which.state())
        return one.prepare(state, _free(which, state))

    expect_no_memory(stage, ask, [case, longer, case])


PREPARE_LAWS = (prepare_remembers_nothing, prepare_only_adds, prepare_is_idempotent)


def laws_of_preparing(stage: Any) -> tuple[Any, ...]:
    """The laws above where a stage prepares something."""
    return PREPARE_LAWS if LookingTraits.of(stage).prepare is not None else ()
