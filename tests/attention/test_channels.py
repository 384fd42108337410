"""ln N as key channels: any plain kernel applied to the widened tensors is degree_attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from centroidkv.attention import degree_attention
from centroidkv.attention.channels import with_degree_channels
from centroidkv.errors import DtypeError, ShapeError
from centroidkv.testing.tolerances import attention_bound, roundoff

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(dtype, size=16, slots=40, length=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 4, length, size, generator=generator).to(dtype)
    keys = torch.randn(2, 2, slots, size, generator=generator).to(dtype)
    values = torch.randn(2, 2, slots, size, generator=generator).to(dtype)
    degree = torch.randint(1, 5000, (2, 2, slots), generator=generator).float()
    degree[..., -length:] = 1
    return query, keys, values, degree


def fused(query, keys, values, scale, hidden):
    return scaled_dot_product_attention(query, keys, values, attn_mask=~hidden, scale=scale, enable_gqa=True)


def written_out(query, keys, values, scale, hidden):
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    logits = (query.float() @ keys.float().mT * scale).masked_fill(hidden, -torch.inf)
    return (logits.softmax(-1) @ values.float()).to(query.dtype)


@pytest.mark.parametrize("kernel", [fused, written_out])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [16**-0.5, 0.3, 1.0, 1e-3])
def test_a_kernel_that_knows_nothing_of_degrees_gives_degree_attention(kernel, dtype, scale):
    query, keys, values, degree = case(dtype)
    hidden = torch.ones(3, 40, dtype=torch.bool).triu(38)
    wide = with_degree_channels(query, keys, degree, scale)
    out = kernel(*wide, values, scale, hidden)
    wanted = degree_attention(query, keys, values, degree, scale=scale, backend="reference")
    assert (out.double() - wanted.double()).abs().max() <= 2 * attention_bound(query, keys, values, degree, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [16**-0.5, 1.0, 1e-3])
def test_two_channels_keep_ln_n_to_the_square_of_the_roundoff(dtype, scale):
    """One channel would not: bfloat16 alone is off by a hundred times this bound."""
    query, keys, _, degree = case(dtype)
    wide_query, wide_keys = (x.double() for x in with_degree_channels(query, keys, degree, scale))
    groups = query.shape[1] // keys.shape[1]
    plain = scale * query.double() @ keys.double().repeat_interleave(groups, 1).mT
    added = scale * wide_query @ wide_keys.repeat_interleave(groups, 1).mT - plain
    logs = degree.double().log().repeat_interleave(groups, 1)[:, :, None]
    # u^2 ln N of the split, and 4 roundings of float32, in which ln N itself is computed.
    bound = (roundoff(dtype) ** 2 + 4 * roundoff(torch.float32)) * logs.max() + 1e-7
    assert (added - logs).abs().max() <= bound
    if dtype == torch.bfloat16:
        hi_only = scale * wide_query[..., :17] @ wide_keys[..., :17].repeat_interleave(groups, 1).mT - plain
        assert (hi_only - logs).abs().max() > 10 * bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_slots_are_absent_whatever_they_hold(dtype):
    query, keys, values, degree = case(dtype)
    degree[..., ::3] = 0
    degree[..., -3:] = 1
    values = values.masked_fill((degree == 0)[..., None], 1000.0)
    keys = keys.masked_fill((degree == 0)[..., None], 100.0)
    hidden = torch.ones(3, 40, dtype=torch.bool).triu(38)
    live = degree[0, 0] > 0
    got = written_out(*with_degree_channels(query, keys, degree, 0.25), values, 0.25, hidden)
    wanted = degree_attention(query, keys[:, :, live], values[:, :, live], degree[..., live], scale=0.25)
    bound = 2 * attention_bound(query, keys[:, :, live], values[:, :, live], degree[..., live], 0.25)
    assert (got.double() - wanted.double()).abs().max() <= bound


def test_the_size_can_be_rounded_up():
    query, keys, _, degree = case(torch.float32)
    wide = with_degree_channels(query, keys, degree, 0.25, multiple=8)
    assert [x.shape[-1] for x in wide] == [24, 24]
    narrow = with_degree_channels(query, keys, degree, 0.25)
    assert all(torch.equal(a[..., :18], b) and not a[..., 18:].any() for a, b in zip(wide, narrow, strict=True))


def test_what_does_not_fit_is_refused():
    query, keys, _, degree = case(torch.float32)
    with pytest.raises(ShapeError, match="degree"):
        with_degree_channels(query, keys, degree[..., 1:], 0.25)
    with pytest.raises(ShapeError, match="positive"):
        with_degree_channels(query, keys, degree, 0.0)
    with pytest.raises(DtypeError, match="share"):
        with_degree_channels(query.half(), keys, degree, 0.25)
