"""Laws of fast paths: another implementation of a stage equals the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from centroidkv.testing import attention_laws, matching_laws, round_laws
from centroidkv.testing.aggregate_laws import MergeCase, expect_merged_close, merges
from centroidkv.testing.aggregate_laws import run as run_aggregator
from centroidkv.testing.law import Law, expect, expect_same, law
from centroidkv.testing.round_laws import RoundCase, rounds
from centroidkv.testing.strategies import AttentionCase, MatchCase, attentions, matches
from centroidkv.testing.tolerances import attention_bound, score_bound


@dataclass(frozen=True)
class Pair:
    """A fast implementation and the reference that defines it."""

    fast: Any
    reference: Any


@law("reaches the reference's scores; ties may be broken by another index of the same score", matches())
def matches_as_well(pair: Pair, case: MatchCase) -> None:
    keys = case.state.state().keys
    ours, theirs = (matching_laws.run(stage, case)[0].joins for stage in (pair.fast, pair.reference))
    scores = matching_laws.SIMILARITIES[case.similarity](keys, keys)
    gap = (matching_laws.reached_scores(scores, ours) - matching_laws.reached_scores(scores, theirs)).abs()
    bound = score_bound(keys, keys, scores, normalised=True).amax((-1, -2)) * case.state.slots
    left = [(joins != torch.arange(case.state.slots)).sum(-1) for joins in (ours, theirs)]
    expect(left[0].equal(left[1]), f"{left[1].tolist()} merges", left[0].tolist())
    expect((gap <= bound).all(), f"{theirs.tolist()} or another one as good", ours.tolist())


@law("merges to the reference's keys, values and degrees", merges)
def merges_as_the_reference(pair: Pair, case: MergeCase) -> None:
    before, ours, assignment = run_aggregator(pair.fast, case)
    theirs = run_aggregator(pair.reference, case)[1]
    stays = assignment.stays
    expect_same(ours.degree[stays], theirs.degree[stays], "degrees")
    expect_merged_close(case, before, theirs, ours, stays, roundings=2)


@law("attends as the reference does", attentions())
def attends_as_the_reference(pair: Pair, case: AttentionCase) -> None:
    tensors = case.tensors()
    theirs = pair.reference(*tensors, causal=case.causal)
    bound = 2 * attention_bound(*tensors, case.size**-0.5)
    attention_laws._expect_close(pair.fast(*tensors, causal=case.causal), theirs, bound)


@law("does the same round as the reference; ties may be broken otherwise where rounding decides them", rounds)
def rounds_as_the_reference(pair: Pair, case: RoundCase) -> None:
    before = case.state.state()
    ours, theirs = (round_laws.run(way, case) for way in (pair.fast, pair.reference))
    round_laws.expect_a_round(case, before, ours)
    round_laws.expect_the_same_round(case, before, ours, theirs)


LAWS: dict[str, Law] = {
    "matching": matches_as_well,
    "aggregate": merges_as_the_reference,
    "attention": attends_as_the_reference,
    "round": rounds_as_the_reference,
}


def check_backend(
    fast: Callable[..., Any],
    reference: Callable[..., Any],
    family: str,
    examples: int | None = None,
    cases: SearchStrategy[Any] | None = None,
) -> None:
    """Check that ``fast`` equals ``reference``.

    Args:
        fast: the implementation to check.
        reference: the one that defines it, called with the same arguments.
        family: "matching" or "aggregate" (stages), "attention" (called as ``degree_attention``) or "round" (called
            as ``(keys, values, degree, positions, chunk, quotas)``, alternating chunks, ranked within each).
        examples: tries.
        cases: inputs, for a fast path that promises less than the reference (``strategies.matches(splits=...)``).

    >>> from functools import partial
    >>> from centroidkv.attention import degree_attention
    >>> fast, slow = partial(degree_attention, backend="sdpa"), partial(degree_attention, backend="reference")
    >>> check_backend(fast, slow, "attention", examples=5)
    """
    law = LAWS[family]
    (law if cases is None else replace(law, cases=cases)).check(Pair(fast, reference), examples)
