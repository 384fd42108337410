"""The Triton kernel, in its interpreter, against the reference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings

from centroidkv import attention
from centroidkv.attention import chosen_backend, degree_attention
from centroidkv.attention.reference import degree_attention_reference
from centroidkv.errors import BackendError, DtypeError, ShapeError
from tests.attention.kernel_cases import Case, kernel_bound, kernel_cases, memory_of_nan

pytest.importorskip("triton")
kernels = pytest.importorskip("centroidkv.attention.triton")

SMALL = kernels.Tiles(16, 16, 4, 2)  # so that short sequences take several steps and splits
ONE = Case(1, 2, 3, 1, 1, 5, 24, torch.float32, "gaussian", "contiguous", 0, False, True, 1, 0)


def tensors(length=1, slots=300, dtype=torch.float32, size=8, value_size=8):
    query = torch.randn(1, 4, length, size).to(dtype)
    keys, values = torch.randn(1, 2, slots, size).to(dtype), torch.randn(1, 2, slots, value_size).to(dtype)
    return query, keys, values, torch.randint(1, 9, (1, 2, slots)).float()


def assert_close(got, wanted, inputs, scale):
    assert got.dtype == wanted.dtype
    assert torch.isfinite(got).all()
    assert (got.double() - wanted.double()).abs().max() <= kernel_bound(inputs, scale)


@given(kernel_cases())
@example(ONE)
@example(replace(ONE, slots=50, splits=3, size=96, dtype=torch.bfloat16, blind=True))
@example(replace(ONE, slots=70, splits=5, length=3, groups=8, dtype=torch.float16, empty=7))
@settings(max_examples=40)
def test_the_kernel_equals_the_reference(case):
    inputs = case.tensors()
    scale = case.size**-0.5
    wanted = degree_attention_reference(*inputs, scale, case.causal)
    with memory_of_nan():
        got = kernels.degree_attention_triton(*inputs, scale, case.causal, SMALL, case.splits)
    assert_close(got, wanted, inputs, scale)
    if case.blind:
        assert (got[0, -case.groups :] == 0).all()


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_tiles_at_the_usual_sizes(size, dtype):
    inputs = tensors(2, 150, dtype, size, 256 if size == 64 else size)
    with memory_of_nan():
        got = degree_attention(*inputs, backend="triton")
    assert_close(got, degree_attention(*inputs, backend="reference"), inputs, size**-0.5)


def test_a_prompt_of_queries_is_tiled():
    inputs = tensors(length=40, slots=60)
    for causal in (True, False):
        got = degree_attention(*inputs, causal=causal, backend="triton")
        assert_close(got, degree_attention(*inputs, causal=causal, backend="reference"), inputs, 8**-0.5)


def test_splits_add_up_and_repeat_bit_for_bit():
    inputs = tensors()
    outs = [kernels.degree_attention_triton(*inputs, 0.3, True, SMALL, splits) for splits in (1, 2, 19, 128)]
    for out in outs[1:]:
        assert torch.allclose(out, outs[0], atol=1e-6)
    assert kernels.degree_attention_triton(*inputs, 0.3, True, SMALL, 19).equal(outs[2])


def test_a_large_degree_outweighs_by_its_logarithm():
    query, keys, values, degree = tensors(slots=40)
    degree[..., 7] = 2.0**40
    out = degree_attention(query, torch.zeros_like(keys), values, degree, backend="triton")
    assert torch.allclose(out[0, :, 0], values[0, :, 7].repeat_interleave(2, 0), atol=1e-5)


def test_splits_keep_a_device_busy_and_programs_worthwhile():
    device = torch.device("cpu")
    assert kernels.choose_splits(8, 1, device) == 1
    assert kernels.choose_splits(8, 4096, device) == 32
    assert kernels.choose_splits(8, 2**20, device) == 66
    assert kernels.choose_splits(1, 2**20, device) == kernels.MOST_SPLITS
    assert kernels.choose_splits(10**5, 2**20, device) == 1


def test_what_the_kernel_cannot_do_is_refused_by_name(monkeypatch):
    with pytest.raises(DtypeError, match="float64"):
        degree_attention(*tensors(dtype=torch.float64), backend="triton")
    with pytest.raises(ShapeError, match=r"up to 256, keys have 257"):
        degree_attention(*tensors(size=257), backend="triton")
    with pytest.raises(ShapeError, match=r"values have 300"):
        degree_attention(*tensors(value_size=300), backend="triton")
    inputs = tensors()
    with pytest.raises(BackendError, match="no gradient"):
        degree_attention(inputs[0].requires_grad_(), *inputs[1:], backend="triton")
    with torch.no_grad():
        assert degree_attention(*inputs, backend="triton").shape == (1, 4, 1, 8)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="tensors are on the CPU"):
        degree_attention(*tensors(), backend="triton")
    with pytest.raises(BackendError, match="tensors are on the CPU"):
        degree_attention(*tensors(slots=0), causal=False, backend="triton")


def test_nothing_to_attend_to_or_to_return():
    query, keys, values, degree = tensors(slots=0)
    assert degree_attention(query, keys, values, degree, causal=False, backend="triton").equal(torch.zeros(1, 4, 1, 8))
    assert degree_attention(*tensors(value_size=0), backend="triton").shape == (1, 4, 1, 0)


def test_auto_takes_the_kernel_for_few_queries_on_a_gpu(monkeypatch):
    def stand_in(length, device):
        return SimpleNamespace(shape=(1, 1, length, 8), device=torch.device(device))

    monkeypatch.setattr(attention, "kernel_fits", lambda *_: True)
    assert chosen_backend(stand_in(1, "cuda"), None, None) == "triton"
    assert chosen_backend(stand_in(17, "cuda"), None, None) == "sdpa"
    assert chosen_backend(stand_in(1, "cpu"), None, None) == "sdpa"
    monkeypatch.setattr(attention, "kernel_fits", lambda *_: False)
    assert chosen_backend(stand_in(1, "cuda"), None, None) == "sdpa"


def test_cases_name_every_argument_of_their_kernel():
    cases = kernels.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert sorted([*case.signature, *case.constants]) == sorted(case.kernel.arg_names)


def test_the_front_door_does_not_import_triton():
    code = (
        "import sys, torch, centroidkv.attention as a\n"
        "a.degree_attention(torch.ones(1, 1, 1, 4), *torch.ones(2, 1, 1, 3, 4), torch.ones(1, 1, 3))\n"
        "print('centroidkv.attention.triton' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "False"
