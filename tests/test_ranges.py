"""Numbers at the ends of every type's range, through means, rounds, similarities and attention weights."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import Budget, Compressor, KVState, Rotary, native, presets
from centroidkv.aggregate import DegreeWeightedMean, KeepTargetKey
from centroidkv.errors import BackendError, BackendWarning, NonFiniteError
from centroidkv.matching import KMeans
from centroidkv.partition import Alternating
from centroidkv.preserve import Sinks
from centroidkv.queries import exact_moment, expected_attention
from centroidkv.ranges import all_finite, in_hull, power_of_two
from centroidkv.records import Assignment
from centroidkv.similarity import Cosine, Dot, ExpectedLogits, NegativeEuclidean

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GIVES_UP = pytest.mark.filterwarnings("ignore:native rounds give up")
BACKENDS = ["reference", "blocked", pytest.param("fastest", marks=GIVES_UP)]
SHARES = [1.0, 0.6]


def huge(dtype, share, *shape, seed=0):
    """Numbers of both signs, from half of ``share`` of the type's range up, and a few small ones among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    limit = torch.finfo(dtype).max
    large = x.sign() * (0.5 + 0.5 * torch.rand(*shape, generator=generator)) * (limit * share)
    x = torch.where(torch.rand(*shape, generator=generator) < 0.9, large, x)
    x.view(-1)[:2] = torch.tensor([limit, -limit], dtype=torch.float64) * share
    return x.to(dtype)


def exactly(x, degree, joins):
    """Weighted means of the clusters, as whole numbers of the type's smallest step would give them: in two scales."""
    scale = 2.0**-8
    wanted = {}
    for slot in joins.unique().tolist():
        members = (joins == slot).nonzero()[:, 0]
        shares = (degree[members].double() / degree[members].double().sum())[:, None]
        wanted[slot] = (shares * (x[members].double() * scale)).sum(0)
    return scale, wanted


@given(
    dtype=st.sampled_from(DTYPES), share=st.sampled_from(SHARES), seed=st.integers(0, 99), most=st.integers(1, 10**6)
)
def test_the_mean_of_finite_members_is_right_and_among_them(dtype, share, seed, most):
    generator = torch.Generator().manual_seed(seed)
    x = huge(dtype, share, 1, 1, 12, 5, seed=seed)
    degree = torch.randint(1, most + 1, (1, 1, 12), generator=generator).float()
    joins = torch.tensor([[[0, 0, 0, 3, 3, 5, 6, 6, 6, 6, 6, 11]]])
    state = KVState(x, x.flip(-1), degree, torch.arange(12).expand(1, 1, 12))
    for stage in (DegreeWeightedMean(), KeepTargetKey()):
        merged = stage(state, Assignment(joins))
        for before, after in ((state.keys, merged.keys), (state.values, merged.values)):
            assert after.isfinite().all()
            if stage == KeepTargetKey() and before is state.keys:
                assert after.equal(before)
                continue
            scale, wanted = exactly(before[0, 0], degree[0, 0], joins[0, 0])
            bound = 4 * torch.finfo(dtype).eps * torch.finfo(dtype).max * share * scale
            for slot, mean in wanted.items():
                assert ((after[0, 0, slot].double() * scale - mean).abs() <= bound).all()
                members = before[0, 0, joins[0, 0] == slot]
                assert (after[0, 0, slot] <= members.amax(0) + 2 * bound / scale).all()
            for lone in (5, 11):
                assert after[0, 0, lone].equal(before[0, 0, lone])


def test_ordinary_means_keep_their_bits_beside_huge_ones():
    x = torch.randn(1, 1, 6, 4)
    state = KVState.from_kv(x, x)
    joins = torch.tensor([[[0, 0, 0, 3, 3, 3]]])
    alone = DegreeWeightedMean()(state, Assignment(joins)).keys
    x[0, 0, 0, 0], x[0, 0, 1, 0] = 3e38, -3e38
    both = DegreeWeightedMean()(KVState.from_kv(x, x), Assignment(joins)).keys
    assert both[..., 1:].equal(alone[..., 1:])
    assert both[0, 0, 3:].equal(alone[0, 0, 3:])


def build(backend, similarity=None, matching=None):
    builder = Compressor.builder().preserve(Sinks(1)).partition(Alternating(16)).budget(0.25)
    builder = builder if similarity is None else builder.similarity(similarity)
    return (builder if matching is None else builder.matching(matching)).build(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("which", ["keys", "values", "both"])
def test_rounds_of_huge_numbers_equal_those_of_small_ones(backend, dtype, share, which):
    """Scaling by a power of two changes no decision of the cosine, and no digit of a mean."""
    scale = 2.0**-12
    x, y = (huge(dtype, share, 1, 2, 67, 16, seed=seed) for seed in (1, 2))
    keys = x if which in ("keys", "both") else (x.double() * scale).to(dtype)
    values = y if which in ("values", "both") else (y.double() * scale).to(dtype)
    found = build(backend)(KVState.from_kv(keys, values))
    right = build("reference")(KVState.from_kv((x.double() * scale).to(dtype), (y.double() * scale).to(dtype)))
    assert found.positions.equal(right.positions)
    assert found.degree.equal(right.degree)
    for name, out in (("keys", found.keys), ("values", found.values)):
        assert out.isfinite().all()
        small = out.double() * (scale if which in (name, "both") else 1.0)
        limit = 8 * torch.finfo(dtype).eps * torch.finfo(dtype).max * scale
        assert torch.allclose(small, getattr(right, name).double(), rtol=0, atol=limit)


@pytest.mark.skipif(native.why_not_native() is not None, reason=str(native.why_not_native()))
def test_compiled_rounds_say_what_is_beyond_them():
    x = huge(torch.float32, 1.0, 1, 1, 67, 16, seed=1)
    state = KVState.from_kv(x, x)
    with pytest.raises(BackendError, match="'native' was asked for, but some keys or values are too close to the ends"):
        build("native")(state)
    with pytest.warns(BackendWarning, match="native rounds give up: some keys or values"):
        found = build("fastest")(state)
    assert found.keys.equal(build("blocked")(state).keys)


@pytest.mark.parametrize("share", SHARES)
def test_kernels_merge_huge_numbers_as_the_stages_do(share):
    pytest.importorskip("triton")
    from centroidkv.aggregate.triton import merge_triton
    from centroidkv.rounds.triton import fused_round_triton

    for dtype in DTYPES[:3]:
        x = huge(dtype, share, 1, 1, 12, 16)
        degree = torch.randint(1, 10**6, (1, 1, 12)).float()
        state = KVState(x, x.flip(-1), degree, torch.arange(12).expand(1, 1, 12).contiguous())
        joins = torch.tensor([[[0, 0, 0, 3, 3, 5, 6, 6, 6, 6, 6, 11]]])
        stays = joins == torch.arange(12)
        right = DegreeWeightedMean()(state, Assignment(joins))
        found = merge_triton(state.keys, state.values, state.degree, state.positions, joins)
        bound = 4 * torch.finfo(dtype).eps * torch.finfo(dtype).max * 0.25
        for out, wanted in zip(found[:2], (right.keys, right.values), strict=True):
            assert out.isfinite().all()
            assert ((out.double() * 0.25 - wanted[stays].view_as(out).double() * 0.25).abs() <= bound).all()
        keys, values, total, _ = fused_round_triton(state.keys, state.values, degree, state.positions, 12, [4])
        assert keys.isfinite().all()
        assert values.isfinite().all()
        assert total.sum() == degree.sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("name", sorted(presets.ALL))
def test_presets_are_finite_or_refuse_by_name(name, dtype, share):
    size = 16
    for keys_are, values_are in ((True, False), (False, True), (True, True)):
        keys = huge(dtype, share, 1, 2, 130, size) if keys_are else torch.randn(1, 2, 130, size).to(dtype)
        values = huge(dtype, share, 1, 2, 130, size) if values_are else torch.randn(1, 2, 130, size).to(dtype)
        state = KVState.from_kv(keys, values, rotary=Rotary.from_theta(1e4, size))
        state = replace(state, head_data={"queries": torch.randn(1, 2, 64, size)})
        for backend in ("auto", "reference"):
            compressor = replace(presets.ALL[name](0.6), backend=backend)
            if keys_are and share > 0.7 and name in ("balanced", "distinctive") and dtype != torch.float16:
                with pytest.raises(NonFiniteError, match="turning them back leaves"):
                    compressor(state)
                continue
            if name == "kmeans" and keys_are and dtype != torch.float16:  # distances of sqrt(D) times as much
                with pytest.raises(NonFiniteError, match="distances leave"):
                    compressor(state)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                smaller = compressor(state)
            assert all_finite(smaller.keys)
            assert all_finite(smaller.values)


@GIVES_UP
def test_tiny_keys_are_no_zero_keys():
    x = torch.randn(1, 1, 67, 16)
    right = build("reference")(KVState.from_kv(x, x))
    for backend in ("reference", "blocked", "fastest"):
        for power in (-70, -90, -110):
            found = build(backend)(KVState.from_kv(x * 2.0**power, x))
            assert found.positions.equal(right.positions)
            assert found.degree.equal(right.degree)


def test_similarities_say_what_they_cannot_compare():
    x = torch.full((1, 1, 3, 4), 3e38)
    with pytest.raises(NonFiniteError, match=r"products leave torch\.float32; use Cosine"):
        Dot()(x, x)
    with pytest.raises(NonFiniteError, match=r"distances leave torch\.float32"):
        NegativeEuclidean()(x, -x)
    assert NegativeEuclidean()(x, x).eq(0).all()
    assert NegativeEuclidean()(x * 0.25, -x * 0.25).isclose(-x[..., :1]).all()
    assert torch.allclose(Cosine()(x, -x), torch.tensor(-1.0))
    mixed = torch.tensor([[[[2e19, 2e19]]]])
    assert Dot()(mixed, mixed * torch.tensor([1.0, -1.0])) == 0  # either product alone would overflow
    wide = torch.full((1, 1, 1, 4), 1e200, dtype=torch.float64)
    assert NegativeEuclidean()(wide, -wide).isclose(torch.tensor(-4e200, dtype=torch.float64))


def test_kmeans_of_huge_keys_equals_that_of_small_ones():
    x = huge(torch.float32, 0.1, 1, 1, 40, 4)
    degree = torch.randint(1, 1000, (1, 1, 40)).float()
    for similarity in (Cosine(), NegativeEuclidean()):
        near, far = (KMeans(3)(keys, degree, None, similarity, 30) for keys in (x * 2.0**-30, x))
        assert near.joins.equal(far.joins)


@pytest.mark.parametrize("power", [-100, -30, 30, 100])
def test_expected_logits_choose_alike_whatever_the_scale(make_state, power):
    state = make_state(40, queries=True)
    far = replace(
        state, keys=state.keys * 2.0**power, values=state.values * 2.0**power,
        head_data={"queries": state.head_data["queries"] * 2.0**-power},
    )  # fmt: skip
    stage = ExpectedLogits()
    score = []
    for case in (state, far):
        points = stage.features(stage.prepare(case, torch.ones_like(case.live)))
        assert points.isfinite().all()
        score.append(stage(points[:, :, :20], points[:, :, 20:]))
    assert score[1].isfinite().all()
    if power > -100:  # queries of 2^100 squared: their keys are as precise as float32 has them
        assert score[0].argmax(-1).equal(score[1].argmax(-1))


def test_long_queries_are_looked_at_in_float64_or_refused(make_state):
    state = make_state(40, queries=True)
    long = replace(state, head_data={"queries": state.head_data["queries"] * 1e30}, keys=state.keys * 1e20)
    assert exact_moment(long, None).isfinite().all()
    attention = expected_attention(long, None)
    assert attention.isfinite().all()
    assert torch.allclose(attention.sum(-1), torch.ones(2, 2), atol=1e-4)
    with pytest.raises(NonFiniteError, match="queries"):
        exact_moment(replace(state, head_data={"queries": torch.full((2, 2, 3, 16), torch.inf)}), None)


def test_powers_of_two_scale_exactly():
    for dtype in (torch.float32, torch.float64):
        limits = torch.finfo(dtype)
        x = torch.tensor([limits.max, 1.0, 3.0, limits.tiny, limits.tiny * limits.eps, 0.0], dtype=dtype)
        scale = power_of_two(x)
        assert scale.isfinite().all()
        assert (torch.frexp(scale).mantissa == 0.5).all()
        assert (x * scale)[:3].ge(0.5).all()
        assert (x * scale).le(4).all()


def test_means_are_not_scaled_without_need():
    seen = []
    in_hull(lambda scale: seen.append(scale) or torch.ones(3), torch.float32)
    assert seen == [1.0]


def test_a_ratio_budget_of_huge_keys_reaches_it():
    x = huge(torch.float32, 1.0, 1, 1, 400, 16)
    assert presets.centroidkv(Budget.tokens(120))(KVState.from_kv(x, x)).slots == 120


def test_a_mean_of_thousands_at_the_end_of_float16_stays_in_it():
    """A float32 sum of 45007 equal numbers is off by more than float16's last number is from infinity."""
    n = 45007
    squeeze = presets.kmeans(Budget.tokens(100)).with_(preserve=(), budget=Budget.tokens(1))
    values = torch.full((1, 1, n, 1), 65504.0, dtype=torch.float16)
    values[0, 0, 0] = -65504
    small = squeeze(KVState.from_kv(torch.ones(1, 1, n, 2), values))
    assert small.values.item() == 65504
