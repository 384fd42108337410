"""Laws of similarities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.strategies import KINDS, make_keys
from centroidkv.testing.tolerances import score_bound


@dataclass(frozen=True)
class PairCase:
    """Two sets of vectors per (batch, head)."""

    rows: int
    columns: int
    size: int = 3
    kind: str = "gaussian"
    batch: int = 1
    heads: int = 1
    seed: int = 0

    def tensors(self) -> tuple[Tensor, Tensor]:
        """``a [B, H, m, D]`` and ``b [B, H, n, D]``, float32."""
        generator = torch.Generator().manual_seed(self.seed)
        both = make_keys(self.kind, (self.batch, self.heads, self.rows + self.columns, self.size), generator)
        return both[:, :, : self.rows], both[:, :, self.rows :]


pairs = st.builds(
    PairCase,
    rows=st.integers(0, 6),
    columns=st.integers(1, 6),
    size=st.sampled_from([1, 2, 3, 16]),
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    seed=st.integers(0, 999),
)


@law("scores are finite numbers of shape [..., m, n]", pairs)
def scores_are_finite(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    scores = similarity(a, b)
    expect(scores.shape == (case.batch, case.heads, case.rows, case.columns), "shape [B, H, m, n]", scores.shape)
    expect(torch.isfinite(scores).all(), "finite scores", scores)


@law("sim(a, b) = sim(b, a)", pairs)
def is_symmetric(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    forth, back = similarity(a, b), similarity(b, a).mT
    close = (forth - back).abs() <= score_bound(a, b, forth, _normalised(similarity))
    expect(close.all(), f"sim(b, a) = {forth}", back)


@law("the score of a pair does not depend on which other vectors are there", pairs)
def pairs_are_scored_alone(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    scores = similarity(a, b)
    if not scores.numel():
        return
    alone = similarity(a[:, :, -1:], b[:, :, :1])
    bound = score_bound(a[:, :, -1:], b[:, :, :1], alone, _normalised(similarity))
    expect(((scores[:, :, -1:, :1] - alone).abs() <= bound).all(), f"{scores[:, :, -1:, :1]}", alone)


@law("no vector is more similar to another than an equal copy of it is", pairs)
def a_copy_is_most_similar(similarity: Any, case: PairCase) -> None:
    a, _ = case.tensors()
    scores = similarity(a, a)
    own = scores.diagonal(dim1=-2, dim2=-1)[..., None]
    bound = score_bound(a, a, scores, _normalised(similarity))
    zero = (a == 0).all(-1)[..., None]  # the zero vector has no direction to share
    expect(((own + bound >= scores) | zero).all(), "the diagonal to be the largest in its row", scores)


@law("scaling a vector by a positive number changes nothing", pairs)
def ignores_scale(similarity: Any, case: PairCase) -> None:
    a, b = case.tensors()
    scores, scaled = similarity(a, b), similarity(a * 2.0**70, b * 2.0**-60)
    bound = score_bound(a, b, scores, normalised=True)
    expect(((scores - scaled).abs() <= bound).all(), f"{scores}", scaled)


@law("the most similar of a vector, its double and its negative is itself or its double, not its negative", pairs)
def prefers_the_same_direction(similarity: Any, case: PairCase) -> None:
    a, _ = case.tensors()
    against = similarity(a, -a).diagonal(dim1=-2, dim2=-1)
    along = similarity(a, a).diagonal(dim1=-2, dim2=-1)
    expect((along >= against).all(), f"at least {against}", along)


SIMILARITY_LAWS = (scores_are_finite, is_symmetric, pairs_are_scored_alone, prefers_the_same_direction)


def _normalised(similarity: Any) -> bool:
    """Whether the scores of unit and huge vectors have the same size: measured, not declared."""
    one, two = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 2.0**20)
    unit = float(similarity(one, one))
    return unit != 0 and abs(float(similarity(two, two)) - unit) < 1e-3


def check_similarity(
    similarity: Any, examples: int | None = None, *, copy_is_best: bool = True, scale_free: bool = False
) -> None:
    """Check a similarity against every law of its family.

    Args:
        similarity: the stage.
        examples: tries per law.
        copy_is_best: nothing is more similar to a vector than its copy (true of cosine and distances, not of dot).
        scale_free: lengths do not matter (true of cosine).

    >>> from centroidkv.similarity import Cosine
    >>> check_similarity(Cosine(), examples=10, scale_free=True)
    """
    extra = ((a_copy_is_most_similar,) if copy_is_best else ()) + ((ignores_scale,) if scale_free else ())
    check_all(SIMILARITY_LAWS + extra, similarity, examples)
