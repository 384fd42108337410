"""Laws of all matchers; those that pair sources and targets have more (:mod:`bipartite_laws`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.protocols import matcher_capacity
from centroidkv.records import Assignment, Partition
from centroidkv.similarity import Cosine, Dot, NegativeEuclidean
from centroidkv.state import KVState, accumulation_dtype
from centroidkv.testing.axes import expect_rows_and_heads_apart
from centroidkv.testing.law import expect, expect_same, given_that, law
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory
from centroidkv.testing.prepare_laws import declared_only, expect_readable, needs, prepared
from centroidkv.testing.strategies import BEYOND_MATCHES, MatchCase, StateCase, matches
from centroidkv.traits import MatcherTraits

SIMILARITY = Cosine()
SIMILARITIES: dict[str, Any] = {"cosine": SIMILARITY, "dot": Dot(), "distance": NegativeEuclidean()}
"""What the laws compare keys with. A matcher receives one of them and must not assume which."""

cases = matches(similarities=tuple(SIMILARITIES))


@dataclass(frozen=True)
class Question:
    """What a matcher is given."""

    keys: Tensor
    degree: Tensor
    partition: Partition
    similarity: Any
    edges: int


def question(matcher: Any, case: MatchCase, state: KVState | None = None) -> Question:
    """What a round would give the matcher in a case (or with another state in its place)."""
    state = prepared(matcher, declared_only(matcher, case.state.state()) if state is None else state)
    both_sides = MatcherTraits.of(matcher).needs_partition
    partition = case.partition() if both_sides else Partition(case.state.slots, ())  # as the rounds do
    name = MatcherTraits.of(matcher).mass
    mass = state.degree if name is None else state.slot_data[name]
    edges = case.edges(int(matcher_capacity(matcher, partition)))
    keys = state.keys.to(accumulation_dtype(state.keys.dtype))
    return Question(keys, mass, partition, SIMILARITIES[case.similarity], edges)


def decide(matcher: Any, asked: Question) -> Assignment:
    """The matcher's answer, which must be an assignment of all slots; nothing that it was given may change."""
    answer = expect_inputs_unchanged(
        matcher, keys=asked.keys, degree=asked.degree, partition=asked.partition, similarity=asked.similarity,
        edges=asked.edges,
    )  # fmt: skip
    expect(isinstance(answer, Assignment), "an Assignment", type(answer).__name__)
    wanted = tuple(asked.keys.shape[:3])
    expect(answer.joins.shape == wanted, f"joins of shape {wanted}", tuple(answer.joins.shape))
    return answer


def run(matcher: Any, case: MatchCase, state: KVState | None = None) -> tuple[Assignment, Partition, int]:
    """The matcher's decision on a case (or on another state in its place), the partition, and the edges asked for."""
    asked = question(matcher, case, state)
    return decide(matcher, asked), asked.partition, asked.edges


def beyond(matcher: Any) -> tuple[MatchCase, ...]:
    """Cases past all sizes in use that suit the matcher: fewer slots where all pairs are compared."""
    if MatcherTraits.of(matcher).needs_partition:
        return BEYOND_MATCHES
    long = BEYOND_MATCHES[4]
    return (*BEYOND_MATCHES[:4], replace(long, state=replace(long.state, slots=700), percent=45))


def beyond_moves(matcher: Any) -> tuple[MatchCase, ...]:
    """The same, with more than 2048 slots in any case."""
    more = () if MatcherTraits.of(matcher).needs_partition else (replace(BEYOND_MATCHES[5], similarity="cosine"),)
    return (*beyond(matcher), *more)


@law("exactly the number of slots asked for leave (at most that, if the matcher is not exact)", cases,
     always=beyond_moves)  # fmt: skip
def removes_as_many_as_asked(matcher: Any, case: MatchCase) -> None:
    assignment, _, edges = run(matcher, case)
    left = (~assignment.stays).sum(-1)
    exact = MatcherTraits.of(matcher).exact
    wanted = torch.full_like(left, edges) if exact else left.clamp(max=edges)
    expect_same(left, wanted, f"slots to leave in every row and head, {edges} asked for")


@law("every slot that leaves joins a slot that stays (or nothing, if the matcher evicts)", cases, always=beyond)
def joins_slots_that_stay(matcher: Any, case: MatchCase) -> None:
    assignment, _, _ = run(matcher, case)
    joins = assignment.joins
    low = -1 if MatcherTraits.of(matcher).evicts else 0
    expect_same(joins.clamp(low, joins.shape[-1] - 1), joins, f"slots in {low}..{joins.shape[-1] - 1}")
    good = assignment.stays.gather(-1, joins.clamp(min=0)) | assignment.evicted
    expect_same(good, torch.ones_like(good), "whether what a slot joins stays")


@law(
    "the same input gives the same assignment, whatever was asked in between",
    cases,
    first=(MatchCase(StateCase(20, heads=2, size=4, seed=7)), MatchCase(StateCase(150, batch=2, size=4, seed=7))),
)
def is_deterministic(matcher: Any, case: MatchCase) -> None:
    longer = replace(case, state=replace(case.state, slots=case.state.slots + 13, seed=case.state.seed + 1))
    more = replace(case, state=replace(case.state, batch=case.state.batch + 1), similarity="dot", percent=90)
    expect_no_memory(matcher, lambda stage, which: run(stage, which)[0], [case, longer, case, more])


@law("rows and heads decide on their own, unless pools_heads says that heads look at each other", cases, always=beyond)
def rows_and_heads_are_independent(matcher: Any, case: MatchCase) -> None:
    state = declared_only(matcher, case.state.state())
    pools = bool(MatcherTraits.of(matcher).pools_heads)
    expect_rows_and_heads_apart(
        lambda one: (run(matcher, case, one)[0].joins,), state, case.state.other(), "the slots joined", pools=pools
    )


@law("moving rows moves their assignments with them, and so for heads", matches(similarities=("dot",), kinds=("ties",)),
     always=[replace(one, similarity="dot", state=replace(one.state, kind="ties", merged=False))
             for one in BEYOND_MATCHES[:3]])  # fmt: skip
def rows_and_heads_are_treated_alike(matcher: Any, case: MatchCase) -> None:
    # Small whole numbers: products and sums are exact, in whatever order, so that no rounding decides.
    state = declared_only(matcher, case.state.state())
    joins = run(matcher, case, state)[0].joins
    given_that(not needs(matcher)[1])
    for axis in (0, 1):
        head_data = {name: data.flip(axis) for name, data in state.head_data.items()}
        seen = state.seen.flip(0) if axis == 0 else state.seen
        moved = state.map_slots(lambda x, axis=axis: x.flip(axis), head_data=head_data, seen=seen)  # type: ignore[misc]
        name = ("rows", "heads")[axis]
        expect_same(run(matcher, case, moved)[0].joins, joins.flip(axis), f"the slots joined with {name} moved")


@law("keys scaled by a power of two give the same assignment where the similarity given, cosine, ignores scale",
     matches())  # fmt: skip
def uses_the_similarity_it_is_given(matcher: Any, case: MatchCase) -> None:
    if MatcherTraits.of(matcher).evicts or not MatcherTraits.of(matcher).needs_partition:
        return  # a matcher that averages keys is entitled to their lengths
    asked = question(matcher, case)
    scale = (2.0 ** (torch.arange(asked.keys.shape[2]) % 5 - 2)[:, None]).to(asked.keys.dtype)
    plain, scaled = decide(matcher, asked), decide(matcher, replace(asked, keys=asked.keys * scale))
    expect_same(scaled.joins, plain.joins, "the slots joined")


@law("where all slots are equal and as many as possible may leave, some do", matches(kinds=("equal",)))
def equal_slots_merge(matcher: Any, case: MatchCase) -> None:
    assignment, _, edges = run(matcher, replace(case, percent=100, state=replace(case.state, merged=False)))
    left = (~assignment.stays).sum(-1)
    expect(edges < 1 or (left > 0).all(), "at least one slot to leave", left.tolist())


EVERY_LENGTH = (*range(14), *(2**k + d for k in range(4, 9) for d in (-1, 0, 1)), 513, 700)


@law("a matcher of all slots can remove as many as its capacity(n) says: a whole number, up to n - 1 (n if it evicts)",
     st.integers(0, 60), first=EVERY_LENGTH)  # fmt: skip
def declared_capacity_is_kept(matcher: Any, length: int) -> None:
    given_that(not MatcherTraits.of(matcher).needs_partition)
    capacity = MatcherTraits.of(matcher).capacity or (lambda n: max(n - 1, 0))
    number = capacity(length)
    expect(isinstance(number, Integral) and not isinstance(number, bool), "a whole number", f"{number!r}")
    high = length if MatcherTraits.of(matcher).evicts else max(length - 1, 0)
    low = min(1, high)
    expect(low <= number <= high, f"a capacity in {low}..{high} of {length} slots", number)
    expect(capacity(length) == number, f"{number} again", lambda: capacity(length))
    if length and number:
        case = MatchCase(StateCase(length, heads=2, seed=length, merged=True), percent=100)
        joins_slots_that_stay.body(matcher, case)
        removes_as_many_as_asked.body(matcher, case)


@law("it says of itself what is read, in words that exist", st.just(None))
def declares_what_exists(matcher: Any, case: None) -> None:
    expect_readable(matcher, MatcherTraits)


@law("it looks at rotations and queries only if needs_rotary or needs_queries says so", matches(most=20))
def needs_only_what_it_says(matcher: Any, case: MatchCase) -> None:
    given_that(case.state.size % 2 == 0)
    joins = run(matcher, case)[0].joins
    whole = case.state.state()
    expect_same(run(matcher, case, whole)[0].joins, joins, "the slots joined where there is more to know")


@law("weigh(scores, source, target) keeps the scores' shape, and weighs every pair alone", matches(most=20))
def weights_are_sound(matcher: Any, case: MatchCase) -> None:
    given_that(MatcherTraits.of(matcher).weigh is not None)
    asked = question(matcher, case)
    scores = asked.similarity(asked.keys, asked.keys)
    weighed = expect_inputs_unchanged(matcher.weigh, scores=scores, source=asked.degree, target=asked.degree)
    expect(weighed.shape == scores.shape, f"shape {tuple(scores.shape)}", tuple(weighed.shape))
    corner = matcher.weigh(scores[..., :1, -1:], asked.degree[..., :1], asked.degree[..., -1:])
    bound = 8 * torch.finfo(torch.float32).eps * corner.abs().double()
    expect_same(weighed[..., :1, -1:], corner, "the weighted score of a pair", bound)


def laws_of(matcher: Any) -> tuple[Any, ...]:
    """Those laws of all matchers that what the stage declares gives a meaning to."""
    own = () if MatcherTraits.of(matcher).needs_partition else (declared_capacity_is_kept,)
    alike = () if needs(matcher)[1] else (rows_and_heads_are_treated_alike,)
    weighed = (weights_are_sound,) if MatcherTraits.of(matcher).weigh is not None else ()
    return MATCHER_LAWS + alike + own + weighed


MATCHER_LAWS = (
    is_deterministic,
    removes_as_many_as_asked,
    joins_slots_that_stay,
    rows_and_heads_are_independent,
    uses_the_similarity_it_is_given,
    equal_slots_merge,
    needs_only_what_it_says,
    declares_what_exists,
)


def reached_scores(scores: Tensor, joins: Tensor) -> Tensor:
    """Sum of the scores of all merges."""
    moved = joins != torch.arange(joins.shape[-1])
    return (scores.gather(-1, joins.clamp(min=0)[..., None])[..., 0] * moved).sum(-1).double()
