"""Laws of similarities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.testing.axes import expect_rows_and_heads_apart
from centroidkv.testing.law import check_all, expect, expect_same, given_that, law
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory
from centroidkv.testing.prepare_laws import declared_only, expect_readable, laws_of_preparing, prepared
from centroidkv.testing.strategies import BEYOND_TILES, KINDS, StateCase, make_keys, states
from centroidkv.testing.tolerances import score_bound
from centroidkv.traits import SimilarityTraits


@dataclass(frozen=True)
class PairCase:
    """Two sets of vectors per (batch, head), or per (batch, head, chunk) if there are ``chunks``."""

    rows: int
    columns: int
    size: int = 3
    kind: str = "gaussian"
    batch: int = 1
    heads: int = 1
    seed: int = 0
    chunks: int = 0
    double: bool = False

    def tensors(self) -> tuple[Tensor, Tensor]:
        """``a [B, H, m, D]`` and ``b [B, H, n, D]``, with chunks ``[B, H, C, ., D]``."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.heads * max(self.chunks, 1), self.rows + self.columns, self.size)
        both = make_keys(self.kind, shape, generator)
        if self.kind == "extreme":  # norms from 1e-6 on: shorter keys need not have a direction
            both = both * 10.0 ** torch.where(torch.linalg.vector_norm(both, dim=-1, keepdim=True) < 1e-5, 8, 0)
        if self.double:
            both = both.double()
        if self.chunks:
            both = both.unflatten(1, (self.heads, self.chunks))
        return both[..., : self.rows, :].contiguous(), both[..., self.rows :, :].contiguous()


pairs = st.builds(
    PairCase,
    rows=st.integers(0, 6),
    columns=st.integers(1, 6),
    size=st.sampled_from([1, 2, 3, 16]),
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    seed=st.integers(0, 999),
    chunks=st.sampled_from([0, 0, 2]),
    double=st.booleans(),
)
ALWAYS = (
    PairCase(7, 9, 66, batch=3, heads=67, seed=1),
    PairCase(5, 6, 80, batch=67, heads=2, seed=2),
    PairCase(3, 4, 300, batch=2, heads=3, chunks=90, seed=3),
    PairCase(300, 280, 258, heads=3, seed=4, double=True),
    PairCase(2100, 9, 8, heads=2, seed=5),
    PairCase(9, 2100, 5, heads=2, seed=6),
)
"""Sizes past every tile in use, one direction after the other: always tried."""


def scores_of(similarity: Any, a: Tensor, b: Tensor) -> Tensor:
    """The scores, of the shape they must have."""
    scores = expect_inputs_unchanged(similarity, a=a, b=b)
    expect(isinstance(scores, Tensor), "a tensor of scores", type(scores).__name__)
    expect(scores.shape == (*a.shape[:-1], b.shape[-2]), f"shape {(*a.shape[:-1], b.shape[-2])}", tuple(scores.shape))
    return scores


def bound_of(similarity: Any, a: Tensor, b: Tensor, scores: Tensor) -> Tensor:
    """How far apart two right scores may be."""
    return score_bound(a, b, scores, _normalised(similarity))


@law("scores are finite numbers of shape [..., m, n], whatever stands in front", pairs, always=ALWAYS)
def scores_are_finite(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    expect(torch.isfinite(scores_of(similarity, a, b)).all(), "finite scores", lambda: similarity(a, b))


@law("sim(a, b) = sim(b, a)", pairs, always=ALWAYS)
def is_symmetric(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    forth, back = scores_of(similarity, a, b), scores_of(similarity, b, a).mT
    expect_same(back, forth, "sim(b, a)", bound_of(similarity, a, b, forth))


@law("the score of a pair does not depend on which other vectors are there", pairs, always=ALWAYS)
def pairs_are_scored_alone(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    scores = scores_of(similarity, a, b)
    if not scores.numel():
        return
    one, two = a[..., -1:, :], b[..., :1, :]
    alone = scores_of(similarity, one, two)
    expect_same(alone, scores[..., -1:, :1], "the score of a pair alone", bound_of(similarity, one, two, alone))
    flipped = scores_of(similarity, a.flip(-2), b.flip(-2)).flip(-1, -2)
    expect_same(flipped, scores, "the scores of the vectors in the opposite order", bound_of(similarity, a, b, scores))
    # The first row and head by itself, and the last one with all others exchanged.
    bound = bound_of(similarity, a, b, scores)
    first = scores_of(similarity, a[:1, :1], b[:1, :1])
    expect_same(first, scores[:1, :1], "the scores of the first row and head alone", bound[:1, :1])
    c, d = replace(case, seed=case.seed + 1009).tensors()
    keep = torch.zeros(a.shape[:-2], dtype=torch.bool)
    keep[(-1,) * (a.ndim - 2)] = True
    wide = keep[..., None, None]
    others = scores_of(similarity, torch.where(wide, a, c), torch.where(wide, b, d))
    expect_same(others[keep], scores[keep], "the last row and head's scores when all others are changed", bound[keep])
    c = torch.cat((a[..., :1, :], c[..., 1:, :]), -2)
    one_kept = scores_of(similarity, c, b)[..., :1, :]
    expect_same(one_kept, scores[..., :1, :], "the first vector's scores when the others change", bound[..., :1, :])


@law("every channel counts", pairs, always=ALWAYS)
def every_channel_counts(similarity: Any, case: PairCase) -> None:
    given_that(case.kind == "gaussian" and case.rows)
    a, b = case.tensors()
    a, b = a.flatten(0, -3)[-1:, :1], b.flatten(0, -3)[-1:]
    given_that(case.size < 3 or b.shape[1] > 1)
    base = scores_of(similarity, a, b)
    far = a.expand(1, case.size, -1).clone()
    place = torch.arange(case.size)
    far[0, place, place] = -100 * torch.where(a[0, 0] < 0, -1.0, 1.0).to(a.dtype) - far[0, place, place]
    moved = (scores_of(similarity, far, b) != base).any(-1)[0]
    expect(
        moved.all(), "a score that changes with every channel", lambda: f"none with {(~moved).nonzero()[0].tolist()}"
    )


@law("no vector is more similar to another than an equal copy of it is, and none that points elsewhere as similar",
     pairs, always=ALWAYS[:4])  # fmt: skip
def a_copy_is_most_similar(similarity: Any, case: PairCase) -> None:
    a, _ = case.tensors()
    scores = scores_of(similarity, a, a).double()
    own = scores.diagonal(dim1=-2, dim2=-1)[..., None]
    bound = bound_of(similarity, a, a, scores)
    zero = (a == 0).all(-1)[..., None]  # the zero vector has no direction to share
    expect(((own + bound >= scores) | zero).all(), "the diagonal to be the largest in its row", scores)
    # Of vectors of ordinary length, at least 60 degrees apart, equality would mean that direction does not count.
    norm = torch.linalg.vector_norm(a.double(), dim=-1, keepdim=True)
    unit = a.double() / norm.clamp(min=1e-30)
    ordinary = (norm > 0.1) & (norm < 1e3)
    apart = (unit @ unit.mT < math.cos(math.pi / 3)) & ordinary & ordinary.mT
    expect((own.expand(scores.shape) > scores)[apart].all(), "a copy to be more similar than what points elsewhere",
           scores)  # fmt: skip


@law("scaling a vector by a positive number changes nothing", pairs, always=ALWAYS[:4])
def ignores_scale(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    scores, scaled = similarity(a, b), similarity(a * 2.0**70, b * 2.0**-60)
    expect_same(scaled, scores, "the scores of scaled vectors", score_bound(a, b, scores, normalised=True))


@law("a vector is more similar to itself than to its negative", pairs, always=ALWAYS[:4])
def prefers_the_same_direction(similarity: Any, case: PairCase) -> None:
    a, _ = case.tensors()
    scores = similarity(a, a)
    against = similarity(a, -a).diagonal(dim1=-2, dim2=-1)
    along = scores.diagonal(dim1=-2, dim2=-1)
    expect((along >= against).all(), f"at least {against}", along)
    norm = torch.linalg.vector_norm(a.double(), dim=-1)
    ordinary = (norm > 0.1) & (norm < 1e3)  # of others a difference may be lost in rounding
    expect((along > against)[ordinary].all(), "sim(a, a) > sim(a, -a)", lambda: (along - against)[ordinary])


@law("scores depend on the two vectors alone, whatever was scored before", pairs,
     first=(PairCase(5, 4, seed=9), PairCase(70, 3, 66, heads=3, seed=9)))  # fmt: skip
def remembers_nothing(similarity: Any, case: PairCase) -> None:
    longer = replace(case, rows=case.rows + 5, columns=case.columns + 70, seed=case.seed + 1)
    expect_no_memory(similarity, lambda stage, which: scores_of(stage, *which.tensors()), [case, longer, case])


@law("it says of itself what is read, in words that exist", st.just(None))
def declares_what_exists(similarity: Any, case: None) -> None:
    expect_readable(similarity, SimilarityTraits)


@law("features are finite points [B, H, T, F], row by row and, unless pools_heads says otherwise, head by head",
     states(least=1, most=24), always=BEYOND_TILES)  # fmt: skip
def features_are_points(similarity: Any, case: StateCase) -> None:
    state = declared_only(similarity, case.state())

    def points(one: Any) -> tuple[Tensor]:
        ready = prepared(similarity, one)
        found = expect_inputs_unchanged(similarity.features, state=ready)
        good = found.ndim == 4 and found.shape[:3] == one.degree.shape and found.is_floating_point()
        expect(good, f"points {(*one.degree.shape, 'F')}", tuple(found.shape))
        return (found,)

    expect(torch.isfinite(points(state)[0]).all() or case.kind == "extreme", "finite points", "infinity or NaN")
    given_that(case.kind != "extreme")
    pools = bool(SimilarityTraits.of(similarity).pools_heads)
    expect_rows_and_heads_apart(points, state, case.other(), "the points", pools=pools)


SIMILARITY_LAWS = (
    remembers_nothing,
    declares_what_exists,
    scores_are_finite,
    is_symmetric,
    pairs_are_scored_alone,
    prefers_the_same_direction,
    every_channel_counts,
)


def _normalised(similarity: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether the scores of unit and huge vectors have the same size: measured, not declared."""
    one, two = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 2.0**20)
    unit = float(similarity(one, one))
    return unit != 0 and abs(float(similarity(two, two)) - unit) < 1e-3


def check_similarity(
    similarity: Any, examples: int | None = None, *, copy_is_best: bool = True, scale_free: bool = False
) -> None:
    """Check a similarity against every law of its family; what it declares (features, prepare) is exercised too.

    Args:
        similarity: the stage.
        examples: tries per law.
        copy_is_best: nothing is more similar to a vector than its copy (true of cosine and distances, not of dot).
        scale_free: lengths do not matter (true of cosine).

    >>> from centroidkv.similarity import Cosine
    >>> check_similarity(Cosine(), examples=10, scale_free=True)
    """
    extra = ((a_copy_is_most_similar,) if copy_is_best else ()) + ((ignores_scale,) if scale_free else ())
    points = () if SimilarityTraits.of(similarity).features is None else (features_are_points,)
    check_all(SIMILARITY_LAWS + extra + laws_of_preparing(similarity) + points, similarity, examples)
