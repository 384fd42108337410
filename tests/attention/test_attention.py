from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from centroidkv.attention import degree_attention
from centroidkv.errors import BackendError, DeviceError, DtypeError, ShapeError

NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
BACKENDS = ["reference", "sdpa", pytest.param("triton", marks=NO_TRITON)]
EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}


def tensors(query_heads=6, heads=2, length=1, slots=40, dtype=torch.float32):
    q = torch.randn(2, query_heads, length, 16).to(dtype)
    k, v = torch.randn(2, heads, slots, 16).to(dtype), torch.randn(2, heads, slots, 8).to(dtype)
    return q, k, v, torch.randint(1, 5, (2, heads, slots)).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("dtype", list(EPS))
def test_degree_n_is_n_copies(backend, length, dtype):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernel refuses float64")
    q, k, v, degree = tensors(length=length, dtype=dtype)
    degree[..., -length:] = 1  # the queries' own tokens
    degree = degree[:1, :1].expand(2, 2, -1).contiguous()
    copies = degree[0, 0].long()
    kk, vv = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    out = degree_attention(q, k, v, degree, backend=backend)
    slots = kk.shape[2]
    mask = torch.ones(length, slots, dtype=torch.bool).tril(slots - length)
    exact = scaled_dot_product_attention(
        q.double(), kk.double().repeat_interleave(3, 1), vv.double().repeat_interleave(3, 1), attn_mask=mask
    )
    assert out.dtype == dtype
    assert torch.allclose(out.double(), exact, atol=4 * EPS[dtype], rtol=4 * EPS[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_degree_zero_is_absent(backend):
    q, k, v, degree = tensors()
    degree[..., ::3] = 0
    out = degree_attention(q, k, v, degree, backend=backend)
    keep = torch.arange(40) % 3 != 0
    fewer = degree_attention(q, k[:, :, keep], v[:, :, keep], degree[:, :, keep], backend=backend)
    assert torch.allclose(out, fewer, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_zeros(backend):
    q, k, v, degree = tensors(length=2)
    degree[0, 1] = 0
    out = degree_attention(q, k, v, degree, backend=backend)
    assert (out[0, 3:] == 0).all()
    assert torch.isfinite(out).all()
    assert degree_attention(q, k[:, :, :0], v[:, :, :0], degree[:, :, :0], causal=False).abs().sum() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_query_heads_read_their_own_group(backend, heads):
    q, k, v, degree = tensors(heads=heads)
    out = degree_attention(q, k, v, degree, backend=backend)
    one = degree_attention(
        q[:, 4:5],
        k[:, 4 * heads // 6][:, None],
        v[:, 4 * heads // 6][:, None],
        degree[:, 4 * heads // 6][:, None],
        backend=backend,
    )
    assert torch.allclose(out[:, 4:5], one, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_queries_own_the_last_slots(backend):
    q, k, v, degree = tensors(length=3)
    out = degree_attention(q, k, v, degree, backend=backend)
    for i in range(3):
        seen = 40 - 2 + i
        alone = degree_attention(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen], degree[:, :, :seen])
        assert torch.allclose(out[:, :, i : i + 1], alone, atol=1e-6)
    free = degree_attention(q, k, v, degree, causal=False, backend=backend)
    assert torch.allclose(free[:, :, 2], out[:, :, 2], atol=1e-6)
    assert not torch.allclose(free[:, :, 0], out[:, :, 0], atol=1e-3)


def test_bad_input_is_refused_by_name():
    q, k, v, degree = tensors()
    with pytest.raises(BackendError, match="sdpa"):
        degree_attention(q, k, v, degree, backend="flash")
    with pytest.raises(ShapeError, match="multiple"):
        degree_attention(q[:, :5], k, v, degree)
    with pytest.raises(ShapeError, match="agree"):
        degree_attention(q, k, v, degree[..., 1:])
    with pytest.raises(ShapeError, match="key size"):
        degree_attention(q[..., :8], k, v, degree)
    with pytest.raises(ShapeError, match="causal"):
        degree_attention(q.expand(-1, -1, 50, -1), k, v, degree)
    with pytest.raises(ShapeError, match="length, size"):
        degree_attention(q[0], k, v, degree)
    with pytest.raises(DtypeError):
        degree_attention(q.half(), k, v, degree)
    with pytest.raises(DeviceError):
        degree_attention(q, k, v, degree.to("meta"))
