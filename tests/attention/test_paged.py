"""Attention over a cache in blocks: the reference against attention over one piece, the kernel against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from centroidkv import native
from centroidkv.attention import degree_attention, paged_degree_attention
from centroidkv.errors import BackendError, DeviceError, DtypeError, ShapeError
from tests.attention.kernel_cases import KINDS, kernel_bound, laid_out, memory_of_nan, numbers


@dataclass(frozen=True)
class Paged:
    lengths: tuple[int, ...]
    block: int = 5
    heads: int = 2
    groups: int = 3
    size: int = 8
    value_size: int = 3
    dtype: torch.dtype = torch.float32
    kind: str = "gaussian"
    layout: str = "contiguous"
    seed: int = 0

    def arguments(self):
        """Blocks in random order; whatever lies behind a request's length would be seen: NaN, or no block at all."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.block) for length in self.lengths]
        total = sum(counts) + 2
        shape = (total, self.block, self.heads)
        query = numbers(self.kind, (len(self.lengths), self.heads * self.groups, self.size), generator)
        keys = numbers(self.kind, (*shape, self.size), generator)
        values = torch.randn(*shape, self.value_size, generator=generator)
        log_degree = torch.randint(0, 9, shape, generator=generator).float().log()
        table = torch.full((len(self.lengths), max(counts) + 1), -7, dtype=torch.int32)
        order = iter(torch.randperm(total, generator=generator).tolist())
        for request, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            for place in range(count):
                table[request, place] = next(order)
            if length % self.block:
                last = int(table[request, count - 1])
                for tensor in (keys, values, log_degree):
                    tensor[last, length % self.block :] = float("nan")
        query, keys, values = query.to(self.dtype), keys.to(self.dtype), values.to(self.dtype)
        keys, values = laid_out(keys, self.layout), laid_out(values, self.layout)
        return query, keys, values, log_degree, table, torch.tensor(self.lengths, dtype=torch.int32)


paged_cases = st.builds(
    Paged,
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    block=st.sampled_from([1, 5, 16]),
    heads=st.integers(1, 2),
    groups=st.sampled_from([1, 3, 17]),
    size=st.sampled_from([1, 5, 24, 96]),
    value_size=st.sampled_from([1, 16, 24]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(["contiguous", "tokens first", "every second"]),
    seed=st.integers(0, 99),
)


def gathered(case, request, arguments):
    """One request's slots in one piece, as degree_attention takes them."""
    query, keys, values, log_degree, table, lengths = arguments
    length = int(lengths[request])
    rows = [(int(table[request, t // case.block]), t % case.block) for t in range(length)]
    at = tuple(torch.tensor(rows, dtype=torch.long).reshape(-1, 2).T)
    pieces = [tensor[at].transpose(0, 1)[None] for tensor in (keys, values, log_degree.exp())]
    return query[request][None, :, None], *pieces


def expect_close(case, arguments, got, wanted):
    """``got`` is ``wanted``, the reference's, up to what rounding allows."""
    assert got.dtype == case.dtype
    assert torch.isfinite(got).all()
    for request in range(len(case.lengths)):
        bound = kernel_bound(gathered(case, request, arguments), case.size**-0.5)
        assert (got[request].double() - wanted[request].double()).abs().max() <= bound


@given(paged_cases)
@settings(max_examples=25)
def test_the_reference_is_attention_over_the_gathered_slots(case):
    arguments = case.arguments()
    out = paged_degree_attention(*arguments, backend="reference")
    assert out.shape == (len(case.lengths), case.heads * case.groups, case.value_size)
    for request in range(len(case.lengths)):
        inputs = gathered(case, request, arguments)
        whole = degree_attention(*inputs, causal=False, backend="reference")
        bound = kernel_bound(inputs, case.size**-0.5)
        assert (out[request].double() - whole[0, :, 0].double()).abs().max() <= bound


@given(paged_cases, st.integers(1, 4))
@settings(max_examples=30)
def test_the_kernel_equals_the_reference(case, splits):
    kernels = pytest.importorskip("centroidkv.attention.paged.triton")
    arguments = case.arguments()
    wanted = paged_degree_attention(*arguments, backend="reference")
    tiles = kernels.Tiles(16, 16, 4, 2)
    with memory_of_nan():
        got = kernels.paged_degree_attention_triton(*arguments, scale=case.size**-0.5, tiles=tiles, splits=splits)
    expect_close(case, arguments, got, wanted)


@given(paged_cases)
@settings(max_examples=40)
def test_fused_attention_over_gathered_blocks_equals_the_reference(case):
    arguments = case.arguments()
    query, keys, values, log_degree, table, lengths = arguments
    wanted = paged_degree_attention(*arguments, backend="reference")
    by_head = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (keys, values)]  # gathered without a copy
    for held in ((keys, values), by_head):
        got = paged_degree_attention(query, *held, log_degree, table, lengths, backend="sdpa")
        expect_close(case, arguments, got, wanted)


@pytest.mark.skipif(native.why_not_native() is not None, reason=str(native.why_not_native()))
@given(paged_cases, st.sampled_from([16, 64]), st.sampled_from([16, 48]), st.sampled_from([1, 7, 64]))
@settings(max_examples=60)
def test_the_compiled_loop_equals_the_reference(case, size, value_size, block):
    dtype = torch.float32 if case.dtype == torch.float16 else case.dtype
    case = replace(case, size=size, value_size=value_size, block=block, dtype=dtype)
    arguments = case.arguments()
    wanted = paged_degree_attention(*arguments, backend="reference")
    got = paged_degree_attention(*arguments, backend="native")
    expect_close(case, arguments, got, wanted)


@pytest.mark.skipif(native.why_not_native() is not None, reason=str(native.why_not_native()))
@pytest.mark.parametrize("place", [0, 3, 36])
def test_the_compiled_loop_tells_on_nan(place):
    query, keys, values, log_degree, table, lengths = Paged((40, 40), size=16, value_size=16, block=40).arguments()
    keys[int(table[0, 0]), place] = float("nan")
    out = paged_degree_attention(query, keys, values, log_degree, table, lengths, backend="native")
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_the_compiled_loop_says_what_it_does_not_take():
    with pytest.raises(BackendError, match="multiples of 16, not 8"):
        paged_degree_attention(*Paged((10, 3)).arguments(), backend="native")
    case = Paged((10, 3), size=16, value_size=16, dtype=torch.float16)
    with pytest.raises(BackendError, match=r"not torch\.float16"):
        paged_degree_attention(*case.arguments(), backend="native")


def test_default_tiles_at_a_usual_size():
    pytest.importorskip("triton")
    arguments = Paged((150, 0, 33), block=16, size=128, value_size=128, dtype=torch.bfloat16).arguments()
    got, wanted = (paged_degree_attention(*arguments, backend=backend) for backend in ("triton", "reference"))
    assert torch.allclose(got.float(), wanted.float(), atol=2**-6)
    assert (got[1] == 0).all()


def test_requests_may_share_blocks_and_auto_is_fused_attention_on_the_cpu():
    query, *blocks, table, lengths = Paged((10, 10)).arguments()
    query[1], table[1] = query[0], table[0]
    out = paged_degree_attention(query, *blocks, table, lengths)
    assert out[0].equal(out[1])
    assert out.equal(paged_degree_attention(query, *blocks, table, lengths, backend="sdpa"))
    halved = paged_degree_attention(query / 2, *blocks, table, lengths, scale=2 * 8**-0.5)
    assert torch.allclose(out, halved)


def test_bad_input_is_refused_by_name(monkeypatch):
    query, keys, values, log_degree, table, lengths = Paged((10, 3)).arguments()

    def attend(**changed):
        given = {"query": query, "key_blocks": keys, "value_blocks": values, "log_degree": log_degree}
        return paged_degree_attention(**{**given, "block_table": table, "lengths": lengths, **changed})

    with pytest.raises(BackendError, match="reference"):
        attend(backend="flash")
    with pytest.raises(ShapeError, match=r"\[R, Hq, D\]"):
        attend(query=query[None])
    with pytest.raises(ShapeError, match="agree"):
        attend(log_degree=log_degree[1:])
    with pytest.raises(ShapeError, match="key size"):
        attend(query=query[..., 1:])
    with pytest.raises(ShapeError, match="multiple"):
        attend(query=query[:, 1:])
    with pytest.raises(ShapeError, match="block_table"):
        attend(block_table=table[:1])
    with pytest.raises(ShapeError, match="lengths must be 0 to 15"):
        attend(lengths=lengths + 10)
    with pytest.raises(ShapeError, match="lengths must be 0 to 15"):
        attend(lengths=-lengths)
    with pytest.raises(ShapeError, match="names blocks 0 to 4"):
        attend(lengths=lengths + 5)
    with pytest.raises(DtypeError, match="share"):
        attend(query=query.half())
    with pytest.raises(DtypeError, match="float32"):
        attend(log_degree=log_degree.half())
    with pytest.raises(DtypeError, match="int32"):
        attend(lengths=lengths.long())
    with pytest.raises(DeviceError):
        attend(lengths=lengths.to("meta"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="backend='triton' was asked for"):
        attend(backend="triton")


def test_nothing_to_attend_to():
    query, keys, values, log_degree, table, lengths = Paged((10, 3)).arguments()
    assert (paged_degree_attention(query, keys, values, log_degree, table[:, :0], 0 * lengths) == 0).all()
    nobody = paged_degree_attention(query[:0], keys, values, log_degree, table[:0], lengths[:0])
    assert nobody.shape == (0, 6, 3)


def test_cases_name_every_argument_of_their_kernel():
    kernels = pytest.importorskip("centroidkv.attention.paged.triton")
    for case in kernels.cases():
        assert sorted([*case.signature, *case.constants]) == sorted(case.kernel.arg_names)
