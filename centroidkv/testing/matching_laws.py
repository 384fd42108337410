"""Laws of matchers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from centroidkv.protocols import matcher_capacity
from centroidkv.records import Assignment, Partition
from centroidkv.similarity import Cosine
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.oracles import chunks_of
from centroidkv.testing.strategies import MatchCase, matches
from centroidkv.testing.tolerances import score_bound

SIMILARITY = Cosine()
"""What the laws compare keys with. A matcher receives it and must not assume it."""


def run(matcher: Any, case: MatchCase, keys: Tensor | None = None) -> tuple[Assignment, Partition, int]:
    """The matcher's decision on a case (or on other keys in its place), the partition, and the edges asked for."""
    state, partition = case.state.state(), case.partition()
    keys = state.keys if keys is None else keys
    edges = case.edges(matcher_capacity(matcher, partition))
    return matcher(keys, state.degree[: keys.shape[0], : keys.shape[1]], partition, SIMILARITY, edges), partition, edges


@law("exactly the number of slots asked for leave (at most that, if the matcher is not exact)", matches())
def removes_as_many_as_asked(matcher: Any, case: MatchCase) -> None:
    assignment, _, edges = run(matcher, case)
    left = (~assignment.stays).sum(-1)
    good = left == edges if getattr(matcher, "exact", True) else left <= edges
    expect(good.all(), f"{edges} slots to leave in every row and head", left.tolist())


@law("every slot that leaves joins a slot that stays (or nothing, if the matcher evicts)", matches())
def joins_slots_that_stay(matcher: Any, case: MatchCase) -> None:
    assignment, _, _ = run(matcher, case)
    joins = assignment.joins
    low = -1 if getattr(matcher, "evicts", False) else 0
    inside = (joins >= low) & (joins < joins.shape[-1])
    expect(inside.all(), f"slots in {low}..{joins.shape[-1] - 1}", joins.tolist())
    good = assignment.stays.gather(-1, joins.clamp(min=0)) | assignment.evicted
    expect(good.all(), "targets that stay", joins.tolist())


@law("the same input gives the same assignment", matches())
def is_deterministic(matcher: Any, case: MatchCase) -> None:
    first, second = run(matcher, case)[0], run(matcher, case)[0]
    expect(first == second, f"{first.joins.tolist()} again", second.joins.tolist())


@law("rows and heads decide on their own: one alone reaches the same scores as in the batch", matches())
def rows_and_heads_are_independent(matcher: Any, case: MatchCase) -> None:
    keys = case.state.state().keys
    together, alone = run(matcher, case)[0], run(matcher, case, keys[:1, :1])[0]
    scores = SIMILARITY(keys[:1, :1], keys[:1, :1])
    reached = [_reached(scores, joins) for joins in (together.joins[:1, :1], alone.joins)]
    bound = score_bound(keys[:1, :1], keys[:1, :1], scores, normalised=True).max() * keys.shape[2]
    same = together.joins[:1, :1].equal(alone.joins) or (reached[0] - reached[1]).abs().max() <= bound
    expect(same, f"{together.joins[0, 0].tolist()}, as in the batch", alone.joins[0, 0].tolist())


@law("keys scaled by a power of two give the same assignment: cosine, the similarity given, ignores scale", matches())
def uses_the_similarity_it_is_given(matcher: Any, case: MatchCase) -> None:
    if getattr(matcher, "evicts", False) or not getattr(matcher, "needs_partition", True):
        return  # a matcher that averages keys is entitled to their lengths
    keys = case.state.state().keys
    scale = 2.0 ** (torch.arange(keys.shape[2]) % 5 - 2)[:, None]
    plain, scaled = run(matcher, case)[0], run(matcher, case, keys * scale)[0]
    expect(plain == scaled, f"{plain.joins.tolist()} again", scaled.joins.tolist())


@law("sources join targets of their own chunk", matches())
def stays_within_sides_and_chunks(matcher: Any, case: MatchCase) -> None:
    assignment, partition, _ = run(matcher, case)
    allowed = {source: targets for sources, targets in chunks_of(partition) for source in sources}
    for joins in assignment.joins.flatten(0, 1).tolist():
        for slot, target in enumerate(joins):
            good = target == slot or target in allowed.get(slot, ())
            expect(good, f"slot {slot} to stay or to join one of {allowed.get(slot, [])}", f"it joins {target}")


@law("a source that leaves joins a target as similar as its best one", matches())
def joins_the_best_target(matcher: Any, case: MatchCase) -> None:
    for edge in _edges(matcher, case):
        expect(edge.reached >= edge.best - edge.bound, f"slot {edge.source} to reach {edge.best}", edge.reached)


@law("the edges carried out are the most similar ones", matches())
def carries_out_the_best_edges(matcher: Any, case: MatchCase) -> None:
    edges = list(_edges(matcher, case, everyone=True))
    for head in {edge.head for edge in edges}:
        mine = [edge for edge in edges if edge.head == head]
        accepted = [edge for edge in mine if edge.leaves]
        refused = [edge for edge in mine if not edge.leaves]
        if accepted and refused and getattr(matcher, "exact", True):
            worst, left = min(accepted, key=lambda e: e.best), max(refused, key=lambda e: e.best)
            expect(
                worst.best >= left.best - 2 * left.bound,
                f"slot {left.source} (score {left.best}) before slot {worst.source}",
                f"slot {worst.source} (score {worst.best}) left instead",
            )


@law("among equals the earliest source leaves, for the earliest target of its chunk", matches(kinds=("equal",)))
def ties_go_to_the_earliest(matcher: Any, case: MatchCase) -> None:
    if hasattr(matcher, "weigh"):
        return  # equal keys of different weight are not equals
    assignment, partition, _ = run(matcher, case)
    chunks = [(sorted(s), sorted(t)) for s, t in chunks_of(partition) if s and t]
    first = {source: targets[0] for sources, targets in chunks for source in sources}
    for joins in assignment.joins.flatten(0, 1).tolist():
        for slot, target in enumerate(joins):
            expect(target in (slot, first.get(slot, slot)), f"slot {slot} to join {first.get(slot)}", target)
        for sources, _ in chunks:
            leaving = [joins[source] != source for source in sources]
            expect(leaving == sorted(leaving, reverse=True), f"the earliest of {sources} to leave", leaving)


class _Edge:
    """One source with its best possible score and the one it reached."""

    def __init__(self, head: int, source: int, best: float, reached: float, leaves: bool, bound: float) -> None:
        self.head, self.source, self.best, self.reached = head, source, best, reached
        self.leaves, self.bound = leaves, bound


def _edges(matcher: Any, case: MatchCase, everyone: bool = False) -> Iterator[_Edge]:
    assignment, partition, _ = run(matcher, case)
    state = case.state.state()
    keys, masses = state.keys.flatten(0, 1).double(), state.degree.flatten(0, 1)
    for head, (key, mass, joins) in enumerate(zip(keys, masses, assignment.joins.flatten(0, 1).tolist(), strict=True)):
        scores = SIMILARITY(key, key)
        bound = float(score_bound(key.float(), key.float(), scores.float(), normalised=True).max())
        if hasattr(matcher, "weigh"):  # the best edges are then those of the best weighted score
            scores, bound = matcher.weigh(scores, mass, mass), 2 * bound * float(mass.max())
        for sources, targets in chunks_of(partition):
            for source in sources if targets else ():
                leaves = joins[source] != source
                if leaves or everyone:
                    best = float(scores[source, targets].max())
                    yield _Edge(head, source, best, float(scores[source, joins[source]]), leaves, bound)


def _reached(scores: Tensor, joins: Tensor) -> Tensor:
    """Sum of the scores of all merges."""
    moved = joins != torch.arange(joins.shape[-1])
    return (scores.gather(-1, joins.clamp(min=0)[..., None])[..., 0] * moved).sum(-1).double()


MATCHER_LAWS = (
    removes_as_many_as_asked,
    joins_slots_that_stay,
    is_deterministic,
    rows_and_heads_are_independent,
    uses_the_similarity_it_is_given,
)
BIPARTITE_LAWS = (stays_within_sides_and_chunks, joins_the_best_target)
GREEDY_LAWS = (carries_out_the_best_edges, ties_go_to_the_earliest)


def check_matcher(matcher: Any, examples: int | None = None, *, greedy: bool | None = None) -> None:
    """Check a matcher against every law of its family.

    Args:
        matcher: the stage; its declared capabilities (``needs_partition``, ``exact``, ``evicts``) choose the laws.
        examples: tries per law.
        greedy: whether it promises to carry out the most similar edges of a head, ties to the earliest. Default: yes
            if it needs a partition and does not declare another ``rank`` than "sequence".

    >>> from centroidkv.matching import BipartiteSoftMatching
    >>> check_matcher(BipartiteSoftMatching(), examples=10)
    """
    bipartite = getattr(matcher, "needs_partition", True)
    if greedy is None:
        greedy = bipartite and getattr(matcher, "rank", "sequence") == "sequence"
    check_all(MATCHER_LAWS + (BIPARTITE_LAWS if bipartite else ()) + (GREEDY_LAWS if greedy else ()), matcher, examples)
