from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from centroidkv.errors import BackendError, DtypeError, ShapeError, StageError
from centroidkv.matching.bipartite import share_out
from centroidkv.partition import Alternating
from centroidkv.testing import check_backend, round_laws
from tests.kernel_inputs import DTYPES, _blank_is_nan, far_apart, inside_nan  # noqa: F401
from tests.laws.stages import round_by_stages

triton = pytest.importorskip("triton")
from centroidkv.rounds.triton import fused_round_triton  # noqa: E402

pytestmark = pytest.mark.usefixtures("_blank_is_nan")


def few_programs(case):
    """The case with at most two heads and four chunks: the interpreter takes about 20 ms for each chunk of a head."""
    batch = min(case.state.batch, 2)
    state = replace(case.state, batch=batch, heads=min(case.state.heads, 3 - batch), slots=min(case.state.slots, 28))
    return replace(case, state=state, chunk_size=max(case.chunk_size, 7))


def test_the_kernel_obeys_the_law_of_fast_paths():
    check_backend(fused_round_triton, round_by_stages, "round", 25, round_laws.rounds.map(few_programs))


def quotas(slots, chunk, percent):
    partition = Alternating(chunk)(slots)
    return share_out(partition.capacity * percent // 100, [size for size in partition.chunk_capacities if size])


def tensors(slots, size, dtype, value_size=7, batch=1, heads=2):
    keys = torch.randn(batch, heads, slots, size).to(dtype)
    values = torch.randn(batch, heads, slots, value_size).to(dtype)
    degree = torch.randint(1, 300, (batch, heads, slots)).float()
    positions = torch.arange(slots).mul(3).expand(batch, heads, slots).contiguous()
    return keys, values, degree, positions


def expect_equal(inputs, chunk, shares):
    out = fused_round_triton(*inputs, chunk, shares)
    wanted = round_by_stages(*inputs, chunk, shares)
    assert all(
        x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous() for x, y in zip(out, wanted, strict=True)
    )
    assert out[2].equal(wanted[2])
    assert out[3].equal(wanted[3])
    lone = out[2] == inputs[2].gather(-1, out[3].long() // 3)
    for x, y in zip(out[:2], wanted[:2], strict=True):
        eps = torch.finfo(x.dtype).eps
        assert ((x.double() - y.double()).abs() <= 4 * eps * y.double().abs().max().clamp(min=4)).all()
        bits = torch.int32 if x.dtype == torch.float32 else torch.int16
        assert x[lone].view(bits).equal(y[lone].view(bits))
    return out


# Random keys of 24 and more numbers have no near ties, so results are equal and not only as good.
@given(
    slots=st.integers(1, 40),
    chunk=st.integers(12, 50),
    percent=st.integers(0, 100),
    size=st.sampled_from([24, 96]),
    value_size=st.sampled_from([3, 16, 40]),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=12)
def test_keys_values_degrees_and_positions_are_those_of_the_stages(slots, chunk, percent, size, value_size, dtype):
    inputs = [inside_nan(x) for x in tensors(slots, size, dtype, value_size)]
    expect_equal(inputs, chunk, quotas(slots, chunk, percent))


@pytest.mark.parametrize(("size", "dtype"), [(128, torch.bfloat16), (256, torch.float16), (160, torch.float32)])
def test_full_chunks_of_256_and_a_lone_last_slot(size, dtype):
    expect_equal(tensors(257, size, dtype, size, heads=1), 256, quotas(257, 256, 60))


def test_ties_go_to_the_earliest_source_and_target():
    keys, values, degree, positions = tensors(20, 8, torch.float32)
    out = fused_round_triton(torch.ones_like(keys), values, degree, positions, 8, [2, 3, 1])
    gone = [0, 2, 8, 10, 12, 16]
    assert out[3][0, 0].tolist() == [3 * slot for slot in range(20) if slot not in gone]
    wanted = degree.clone()
    for target, sources in ((1, [0, 2]), (9, [8, 10, 12]), (17, [16])):
        wanted[..., target] += degree[..., sources].sum(-1)
    assert out[2].equal(wanted[..., [slot for slot in range(20) if slot not in gone]])


def test_zero_keys_are_similar_to_nothing():
    keys, *rest = tensors(12, 8, torch.bfloat16)
    keys[:, :, ::2] = 0
    out = fused_round_triton(keys, *rest, 12, [3])
    assert out[3][0, 0].tolist() == [3 * slot for slot in range(12) if slot not in (0, 2, 4)]
    assert out[2][..., 0].equal(rest[1][..., [0, 1, 2, 4]].sum(-1))  # slot 1, the earliest target, took all three


def test_merging_equal_rows_changes_no_bit():
    keys, values, degree, positions = tensors(20, 24, torch.float32)
    keys, values = keys[:, :, :1].expand(keys.shape), values[:, :, :1].expand(values.shape)
    out = fused_round_triton(keys, values, degree, positions, 20, [9])
    assert out[0].equal(keys[:, :, :11])
    assert out[1].equal(values[:, :, :11])


def test_a_round_after_a_round():
    inputs = tensors(60, 24, torch.float32)
    for _ in range(3):
        slots = inputs[0].shape[2]
        wanted = round_by_stages(*inputs, 16, quotas(slots, 16, 50))
        inputs = fused_round_triton(*inputs, 16, quotas(slots, 16, 50))
        assert inputs[3].equal(wanted[3])
        assert inputs[2].equal(wanted[2])
        assert (inputs[0] - wanted[0]).abs().max() < 1e-5


def test_positions_keep_their_type():
    keys, values, degree, positions = tensors(9, 24, torch.float32)
    assert expect_equal((keys, values, degree, positions.int()), 9, [4])[3].dtype == torch.int32


def test_the_same_input_gives_the_same_bits():
    inputs = tensors(40, 24, torch.float32)
    out = [fused_round_triton(*inputs, 20, [5, 5]) for _ in range(2)]
    assert all(x.equal(y) for x, y in zip(*out, strict=True))


def test_places_beyond_32_bits():
    keys, values, degree, positions = tensors(5, 8, torch.bfloat16, heads=1)
    near = fused_round_triton(keys, values, degree, positions, 5, [2])
    far = fused_round_triton(far_apart(keys), far_apart(values), degree, positions, 5, [2])
    assert all(x.equal(y) for x, y in zip(near, far, strict=True))


@pytest.mark.parametrize(("slots", "shares"), [(0, []), (1, []), (2, [1]), (2, [0]), (3, [1])])
def test_short_sequences(slots, shares):
    out = fused_round_triton(*tensors(slots, 24, torch.float32), 2, shares)
    assert out[0].shape == (1, 2, slots - sum(shares), 24)
    assert out[2].isfinite().all()


@pytest.mark.parametrize("shares", [[2], [2, 2, 0], [-1, 2], [2, 3]])
def test_quotas_that_do_not_fit_are_refused(shares):
    with pytest.raises(StageError, match="quotas"):
        fused_round_triton(*tensors(9, 4, torch.float32), 4, shares)


@pytest.mark.parametrize(("chunk", "error"), [(257, BackendError), (1, StageError), (None, StageError)])
def test_chunks_that_do_not_fit_are_refused(chunk, error):
    with pytest.raises(error, match=f"got {chunk}"):
        fused_round_triton(*tensors(600, 4, torch.float32), chunk, [0])


@pytest.mark.parametrize(
    ("index", "change", "error", "says"),
    [
        (0, torch.Tensor.double, DtypeError, "float64"),
        (1, lambda x: x[:, :, :3], ShapeError, "agree"),
        (1, lambda x: x.repeat(1, 1, 1, 40), BackendError, "280"),
        (2, lambda x: x[:, :1], ShapeError, "degree must be"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(index, change, error, says):
    inputs = list(tensors(4, 4, torch.float32))
    inputs[index] = change(inputs[index])
    with pytest.raises(error, match=says):
        fused_round_triton(*inputs, 4, [1])
