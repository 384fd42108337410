"""Scores of keys of any rank and length, against float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import KVState, Rotary, presets
from centroidkv.preserve import Distinctive
from centroidkv.scores import RIDGE, cosine_to_mean, leverage, leverage_of, low_norm, passages

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = (
    "normal",
    "rank 1",
    "rank 4",
    "two vectors",
    "one and another",
    "equal",
    "zeros",
    "one channel",
    "far from zero",
)


def make(kind, count, size, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(2, 2, *shape, generator=generator)

    x = normal(count, size)
    if kind.startswith("rank"):
        rank = int(kind.split()[1])
        x = normal(count, rank) @ normal(rank, size)
    elif kind == "two vectors":
        x = normal(2, size)[:, :, torch.randint(2, (count,), generator=generator)]
    elif kind in ("one and another", "equal"):
        x = normal(1, size).repeat(1, 1, count, 1)
        if kind != "equal" and count:
            x[:, :, count // 3] = normal(size)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "one channel":
        x[..., 1:] = 0
    elif kind == "far from zero":
        x = x + 30 * normal(1, size)
    return x.to(dtype)


def hat(x, mass):
    """x_i^T (X^T X + eps I)^-1 x_i on centred rows, in float64."""
    x, mass = x.double(), mass.double()[..., None]
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    x = x - (mass * x).sum(2, keepdim=True) / mass.sum(2, keepdim=True)
    matrix = x.mT @ (mass * x)
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    whole = matrix + (RIDGE * level + 1e-30) * torch.eye(x.shape[-1])
    return (x * torch.linalg.solve(whole, x.mT).mT).sum(-1)


@given(
    kind=st.sampled_from(KINDS), count=st.sampled_from([1, 2, 7, 90, 1200]), size=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), merged=st.booleans(),
)  # fmt: skip
def test_leverage_is_that_of_float64_whatever_the_rank(kind, count, size, dtype, seed, merged):
    x = make(kind, count, size, seed, dtype)
    mass = torch.randint(1, 9, x.shape[:3]).float() if merged else torch.ones(x.shape[:3])
    found, wanted = leverage_of(x, mass).double(), hat(x, mass)
    assert found.isfinite().all()
    assert ((found >= 0) & (found <= 1 + 1e-3)).all()
    spread = x.double().std(2).norm() if count > 1 else 0.0
    if spread > 1e-3 * x.double().norm() / count**0.5:  # else float64 sees differences that are rounding
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1001, 20_001])
def test_all_leverage_is_at_the_one_other_key(dtype, count):
    for seed in range(3):
        score = leverage_of(make("one and another", count, 64, seed, dtype), torch.ones(2, 2, count))
        assert (score.argmax(-1) == count // 3).all()
        assert (score.amax(-1) > 0.998).all()
        assert ((score.sum(-1) - score.amax(-1)) < 2e-3).all()
        score = leverage_of(make("equal", count, 64, seed, dtype), torch.ones(2, 2, count))
        assert (score == 0).all()


def test_rounding_is_not_leverage():
    """Equal keys that were rotated and turned back differ in their last digits; none of them stands out."""
    rotary, positions = Rotary.from_theta(1e4, 64), torch.arange(3000).expand(1, 1, 3000)
    content = torch.randn(1, 1, 1, 64).expand(1, 1, 3000, 64) * 20
    state = KVState.from_kv(rotary.rotate(content, positions), content, rotary=rotary)
    assert not state.before_rope(None).keys.equal(content)
    assert leverage(state.before_rope(None)).max() < 1 / 3000
    other = content.clone()
    other[0, 0, 1234] = torch.randn(64)
    state = KVState.from_kv(rotary.rotate(other, positions), content, rotary=rotary)
    mask = Distinctive().select(state, torch.ones(1, 1, 3000, dtype=torch.bool), 1)
    assert mask[0, 0].nonzero().tolist() == [[1234]]


def test_differences_beyond_rounding_count_as_they_do_in_float64():
    x = torch.randn(1, 1, 1, 64) * 20 + 1e-3 * torch.randn(1, 1, 3000, 64)
    assert torch.allclose(leverage_of(x, torch.ones(1, 1, 3000)).double(), hat(x, torch.ones(1, 1, 3000)), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-1, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_do_not_depend_on_how_long_keys_are(dtype, power, kind):
    x = make(kind, 50, 16, 3).double()
    x = (x / x.abs().max().clamp(min=1)).to(dtype)
    limits = torch.finfo(dtype)
    far = x * (2.0 ** (math.frexp(limits.max)[1] - 1) if power > 0 else limits.tiny * 2**8)
    near, far = (KVState.from_kv(keys, keys) for keys in (x, far.to(dtype)))
    for score in (leverage, cosine_to_mean, passages):
        found, wanted = score(far).double(), score(near).double()
        assert found.isfinite().all()
        assert torch.allclose(found, wanted, rtol=0.05, atol=0.05)
    order = low_norm(far)
    assert order.isfinite().all()
    if kind == "normal" and power > 0 and dtype != torch.float64:  # whose longest norms leave every type
        assert order.argsort(dim=-1).equal(low_norm(near).argsort(dim=-1))


def test_empty_slots_and_no_slots_have_no_score():
    keys = torch.randn(1, 1, 6, 4)
    keys[0, 0, 0] = 1e30  # whatever an empty slot holds
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    padded, alone = KVState.from_kv(keys, keys, mask), KVState.from_kv(keys[:, :, 1:], keys[:, :, 1:])
    assert leverage(padded)[0, 0, 0] == 0
    assert torch.allclose(leverage(padded)[..., 1:], leverage(alone), rtol=1e-4)
    empty = KVState.from_kv(keys[:, :, :0], keys[:, :, :0])
    assert leverage(empty).shape == passages(empty).shape == (1, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_presets_that_look_at_leverage_take_repeated_tokens(dtype):
    rotary, positions = Rotary.from_theta(1e5, 64), torch.arange(2100).expand(1, 2, 2100)
    content = torch.randn(1, 2, 3, 64).repeat(1, 1, 700, 1)
    content[:, :, 1000] = torch.randn(64)
    state = KVState.from_kv(rotary.rotate(content, positions).to(dtype), content.to(dtype), rotary=rotary)
    state = state.__class__(**{**vars(state), "head_data": {"queries": torch.randn(1, 2, 1, 64).expand(1, 2, 512, 64)}})
    for preset in (presets.distinctive, presets.balanced):
        smaller = preset(0.25)(state)
        assert smaller.slots == 525
        assert smaller.keys.isfinite().all()
        assert (smaller.positions == 1000).any(-1).all()
