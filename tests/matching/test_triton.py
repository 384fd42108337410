from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from centroidkv.errors import BackendError, DtypeError, ShapeError, StageError
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.matching.candidates import Candidates, best, best_targets
from centroidkv.partition import Alternating
from centroidkv.similarity import Cosine
from centroidkv.testing import check_backend
from centroidkv.testing.aggregate_laws import MILD
from centroidkv.testing.strategies import KINDS, make_keys, matches
from centroidkv.testing.tolerances import score_bound
from tests.kernel_inputs import DTYPES, _blank_is_nan, far_apart, inside_nan  # noqa: F401

triton = pytest.importorskip("triton")
from centroidkv.matching.triton import best_targets_triton  # noqa: E402

pytestmark = pytest.mark.usefixtures("_blank_is_nan")


def reference(keys, chunk):
    return best_targets(keys.float(), Alternating(chunk)(keys.shape[2]), Cosine())


def expect_equal(keys, chunk):
    score, target = best_targets_triton(keys, chunk)
    wanted = reference(keys, chunk)
    assert (score.dtype, target.dtype) == (torch.float32, torch.int64)
    assert score.shape == target.shape == wanted.score.shape
    if not score.numel():
        return
    exact = keys.double()
    scores = Cosine()(exact, exact)
    bound = score_bound(keys.float(), keys.float(), scores.float(), normalised=True).max()
    assert ((score - wanted.score).abs() <= bound).all()
    # The target is one of the source's chunk, reaches the best score, and is the earliest of those equal to it.
    source = wanted.source.expand_as(target)
    assert (target % chunk % 2 == 1).all()
    assert (target // chunk == source // chunk).all()
    reached = scores.flatten(0, 1)[
        torch.arange(target[..., 0].numel())[:, None], source.flatten(0, 1), target.flatten(0, 1)
    ]
    assert ((reached - wanted.score.flatten(0, 1)).abs() <= bound).all()
    twins = (exact[:, :, :, None] == exact[:, :, None]).all(-1)
    for b, h in [(b, h) for b in range(keys.shape[0]) for h in range(keys.shape[1])]:
        for t in target[b, h].tolist():
            start = t // chunk * chunk
            assert not twins[b, h, t, start + 1 : t : 2].any()


@dataclass(frozen=True)
class Case:
    slots: int
    chunk: int
    size: int
    kind: str
    dtype: torch.dtype
    seed: int


@given(
    st.builds(
        Case,
        slots=st.integers(1, 40),
        chunk=st.integers(3, 48),
        size=st.sampled_from([1, 3, 5, 24, 96]),
        kind=st.sampled_from(KINDS),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 999),
    )
)
@settings(max_examples=25)
def test_scores_and_targets_are_the_references(case):
    kind = "gaussian" if case.dtype == torch.float16 and case.kind not in MILD else case.kind
    keys = make_keys(kind, (1, 2, case.slots, case.size), torch.Generator().manual_seed(case.seed)).to(case.dtype)
    expect_equal(inside_nan(keys), case.chunk)


class OnTriton:
    """Soft matching over the whole sequence, with the kernel's candidates."""

    def __call__(self, keys, degree, partition, similarity, edges):
        if not partition.blocks:
            return BipartiteSoftMatching()(keys, degree, partition, similarity, edges)
        first = partition.blocks[0]
        score, target = best_targets_triton(keys, max(first.sources.shape[1] + first.targets.shape[1], 2))
        source = [block.sources.flatten() for block in partition.blocks if block.targets.shape[1]]
        source = torch.cat(source) if source else torch.empty(0, dtype=torch.long)
        return Candidates(keys.shape[2], source, target, score, []).accept(best(score, edges))


def test_the_kernel_obeys_the_law_of_fast_paths():
    check_backend(OnTriton(), BipartiteSoftMatching(), "matching", 20, matches(("alternating",), most=24))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slots", "chunk"), [(700, 1024), (521, 512)])
def test_chunks_of_many_tiles(dtype, slots, chunk):
    expect_equal(torch.randn(1, 1, slots, 16).to(dtype), chunk)


def test_ties_go_to_the_earliest_target_also_across_tiles():
    keys = torch.ones(1, 1, 600, 4)
    score, target = best_targets_triton(keys * 2.0 ** (torch.arange(600) % 7 - 3)[:, None], 400)
    assert target[0, 0].tolist() == [1] * 200 + [401] * 100
    assert score.sub(1).abs().max() < 1e-6


def test_a_zero_vector_is_similar_to_nothing():
    keys = torch.randn(1, 1, 8, 4)
    keys[0, 0, [0, 3]] = 0
    score, target = best_targets_triton(keys, 8)
    assert (score[0, 0, 0], target[0, 0, 0]) == (0, 1)
    assert score[0, 0, 1:].abs().min() > 0
    expect_equal(keys, 8)


def test_the_largest_and_smallest_numbers_have_directions():
    keys = torch.randn(1, 1, 12, 16)
    keys = keys / keys.abs().amax(-1, keepdim=True)
    keys = keys * torch.tensor([3.4e38, 1e-30, 1e-44, 1.0, 2e38, 1.2e-38] * 2)[:, None]
    score, target = best_targets_triton(keys, 12)
    exact = best_targets(keys.double(), Alternating(12)(12), Cosine())
    assert target.equal(exact.target)
    assert (score - exact.score).abs().max() < 1e-6


def test_rows_of_large_sizes():
    expect_equal(torch.randn(1, 1, 20, 256).bfloat16(), 20)
    expect_equal(torch.randn(1, 1, 20, 200), 20)


def test_places_beyond_32_bits():
    keys = torch.randn(1, 1, 5, 8).bfloat16()
    near, far = best_targets_triton(keys, 4), best_targets_triton(far_apart(keys), 4)
    assert near[0].equal(far[0])
    assert near[1].equal(far[1])


@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_short_sequences(slots):
    score, target = best_targets_triton(torch.randn(2, 1, slots, 4), 2)
    assert score.shape == target.shape == (2, 1, slots // 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "chunk", "error", "says"),
    [
        ((1, 1, 4, 8), torch.float64, 4, DtypeError, "float64"),
        ((1, 1, 4, 257), torch.float32, 4, BackendError, "257"),
        ((1, 4, 8), torch.float32, 4, ShapeError, r"\[B, H, T, D\]"),
        ((1, 1, 4, 8), torch.float32, 1, StageError, "got 1"),
        ((1, 1, 4, 8), torch.float32, None, StageError, "got None"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(shape, dtype, chunk, error, says):
    with pytest.raises(error, match=says):
        best_targets_triton(torch.zeros(shape, dtype=dtype), chunk)


def test_without_a_device_for_triton_the_reason_is_given(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match="on the CPU"):
        best_targets_triton(torch.zeros(1, 1, 4, 8), 4)
