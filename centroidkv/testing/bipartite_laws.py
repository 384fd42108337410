"""Laws of matchers that pair sources with targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.records import Partition
from centroidkv.testing.law import expect, expect_same, given_that, law
from centroidkv.testing.matching_laws import beyond, cases, decide, question
from centroidkv.testing.oracles import chunks_of
from centroidkv.testing.strategies import BEYOND_MATCHES, MatchCase, StateCase, matches
from centroidkv.testing.tolerances import roundoff, score_bound
from centroidkv.traits import MatcherTraits


@dataclass(frozen=True)
class Sides:
    """Per slot ``[T]`` the number of its chunk if it is a source (or a target) of it, else -1."""

    source: Tensor
    target: Tensor

    @classmethod
    def of(cls, partition: Partition) -> Sides:
        """Of chunks that have both sides; the slots of others can only stay."""
        source, target = torch.full((partition.length,), -1), torch.full((partition.length,), -1)
        for number, (sources, targets) in enumerate(chunks_of(partition)):
            if sources and targets:
                source[sources], target[targets] = number, number
        return cls(source, target)


@dataclass(frozen=True)
class Outcome:
    """What a matcher decided for every source that has a target, and how good its choice was; all ``[B, H, S]``."""

    leaves: Tensor
    joins: Tensor
    best: Tensor
    reached: Tensor
    bound: Tensor


def outcome(matcher: Any, case: MatchCase) -> Outcome:
    """The decision beside the best that could be decided, in float64."""
    asked = question(matcher, case)
    joins = decide(matcher, asked).joins
    sides = Sides.of(asked.partition)
    source, target = ((side >= 0).nonzero().flatten() for side in (sides.source, sides.target))
    left, right = asked.keys[:, :, source], asked.keys[:, :, target]
    scores = asked.similarity(left.double(), right.double())
    bound = score_bound(left, right, scores.to(left.dtype), normalised=case.similarity == "cosine")
    if MatcherTraits.of(matcher).weigh is not None:  # the best edges are then those of the best weighted score
        mass = asked.degree[..., source].double(), asked.degree[..., target].double()
        low, high = (matcher.weigh(scores + sign * bound, *mass) for sign in (-1, 1))
        scores = matcher.weigh(scores, *mass)
        bound = (high - low).abs() + 8 * roundoff(torch.float32) * scores.abs()
    allowed = sides.source[source][:, None] == sides.target[target]
    found = joins[..., source]
    column = torch.zeros(joins.shape[-1], dtype=torch.long).index_put((target,), torch.arange(len(target)))
    leaves = found != source
    if not len(source):
        return Outcome(leaves, found >= 0, *(torch.zeros(leaves.shape, dtype=torch.float64),) * 3)
    best = scores.masked_fill(~allowed, -torch.inf).amax(-1)
    reached = scores.gather(-1, column[found.clamp(min=0)][..., None])[..., 0]
    return Outcome(leaves, found >= 0, best, reached, bound.masked_fill(~allowed, 0).amax(-1))


@law("sources join targets of their own chunk", cases, always=beyond)
def stays_within_sides_and_chunks(matcher: Any, case: MatchCase) -> None:
    asked = question(matcher, case)
    joins = decide(matcher, asked).joins
    sides = Sides.of(asked.partition)
    chunk = sides.target[joins.clamp(min=0)]
    good = (joins == torch.arange(joins.shape[-1])) | ((sides.source >= 0) & (chunk == sides.source))
    if MatcherTraits.of(matcher).evicts:
        good |= joins < 0
    expect_same(good, torch.ones_like(good), "whether a slot stays or joins a target of its chunk")


@law("a source that leaves joins a target as similar as its best one, by the similarity it is given", cases,
     always=beyond)  # fmt: skip
def joins_the_best_target(matcher: Any, case: MatchCase) -> None:
    if case.similarity != "cosine" and case.state.kind == "extreme":
        given_that(False)  # norms from 1e-12 to 1e12: what overflows is no similarity
    found = outcome(matcher, case)
    moved = found.leaves & found.joins
    wanted = torch.where(moved, found.best, 0.0)
    # Both the best and the one reached may be off.
    expect_same(torch.where(moved, found.reached, 0.0), wanted, "scores reached", 2 * found.bound)


@law("the edges carried out are the most similar ones", cases, always=beyond)
def carries_out_the_best_edges(matcher: Any, case: MatchCase) -> None:
    if not MatcherTraits.of(matcher).exact:
        return  # it may refuse what it likes
    if case.similarity != "cosine" and case.state.kind == "extreme":
        given_that(False)
    found = outcome(matcher, case)
    inf = torch.tensor(torch.inf, dtype=torch.float64)
    given_that(found.best.shape[-1])
    accepted, refused = found.leaves, ~found.leaves
    worst = torch.where(accepted, found.best + 2 * found.bound, inf).amin(-1)
    left = torch.where(refused, found.best - 2 * found.bound, -inf).amax(-1)
    both = accepted.any(-1) & refused.any(-1)
    good = (worst >= left) | ~both
    expect_same(good, torch.ones_like(both), "whether every edge left out is worse than those carried out")


ONES = tuple(
    MatchCase(StateCase(slots, kind="equal", heads=2, size=4, seed=1), split, chunk, percent)
    for slots, split, chunk, percent in (
        (40, "alternating", None, 30), (200, "halves", None, 60), (300, "alternating", 8, 45),
        (2100, "alternating", 256, 80), (1500, "strided", 600, 20),
    )
)  # fmt: skip


@law("among equals the earliest source leaves, for the earliest target of its chunk", matches(kinds=("equal",)),
     always=ONES)  # fmt: skip
def ties_go_to_the_earliest(matcher: Any, case: MatchCase) -> None:
    asked = question(matcher, replace(case, state=replace(case.state, size=4)))
    # Ones of four channels and of equal mass: every score is the same in whatever order it is computed.
    ones = replace(asked, keys=torch.ones_like(asked.keys), degree=torch.ones_like(asked.degree))
    joins = decide(matcher, ones).joins
    chunks = [(sorted(s), sorted(t)) for s, t in chunks_of(asked.partition) if s and t]
    index = torch.arange(joins.shape[-1])
    first = index.clone()
    for sources, targets in chunks:
        first[sources] = targets[0]
    moved = joins != index
    expect_same(torch.where(moved, joins, first), first.expand(joins.shape), "the target that equals join")
    sources = sorted(slot for chunk, _ in chunks for slot in chunk)
    leaving = moved[..., sources].long()
    earliest = leaving.sort(dim=-1, descending=True, stable=True).values
    expect_same(leaving, earliest, f"which of the sources {sources[:8]}... leave")


@law("ranked within chunks, every chunk gives its share and none looks at another", cases, always=BEYOND_MATCHES[3:5])
def chunks_decide_alone(matcher: Any, case: MatchCase) -> None:
    asked = question(matcher, case)
    base = decide(matcher, asked)
    chunks = [(s, t) for s, t in chunks_of(asked.partition) if s and t]
    total, whole = sum(len(s) for s, _ in chunks), asked.edges
    moved = base.merges
    for sources, _ in chunks[:: max(len(chunks) // 20, 1)]:
        left, share = moved[..., sources].sum(-1), whole * len(sources) / max(total, 1)
        expect(((left - share).abs() < 1).all() or not MatcherTraits.of(matcher).exact,
               f"{share:g} of {len(sources)} sources of a chunk to leave", left)  # fmt: skip
    if len(chunks) < 2:
        return
    slots = torch.tensor([slot for side in chunks[-1] for slot in side])
    keys = asked.keys.clone()
    keys[:, :, slots] = keys[:, :, slots].flip(-1) * -1
    after = decide(matcher, replace(asked, keys=keys)).joins
    others = torch.ones(after.shape[-1], dtype=torch.bool)
    others[slots] = False
    expect_same(after[..., others], base.joins[..., others], "the slots joined in chunks that did not change")


BIPARTITE_LAWS = (stays_within_sides_and_chunks, joins_the_best_target)
GREEDY_LAWS = (carries_out_the_best_edges, ties_go_to_the_earliest)
