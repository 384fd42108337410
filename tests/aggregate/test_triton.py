from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from centroidkv import KVState
from centroidkv.aggregate import DegreeWeightedMean
from centroidkv.errors import BackendError, DtypeError, ShapeError
from centroidkv.records import Assignment
from centroidkv.testing import aggregate_laws, check_backend
from tests.kernel_inputs import DTYPES, _blank_is_nan, far_apart, inside_nan  # noqa: F401

triton = pytest.importorskip("triton")
from centroidkv.aggregate.triton import merge_triton  # noqa: E402

pytestmark = pytest.mark.usefixtures("_blank_is_nan")


class OnTriton:
    """The kernel as an aggregator: head by head, because heads of a law's case keep different numbers of slots."""

    def __call__(self, state, assignment):
        out = {name: getattr(state, name).clone() for name in ("keys", "values", "degree", "positions")}
        for b in range(state.batch):
            for h in range(state.heads):
                one = [x[b : b + 1, h : h + 1] for x in (*(getattr(state, name) for name in out), assignment.joins)]
                for whole, part in zip(out.values(), merge_triton(*one), strict=True):
                    whole[b, h, assignment.stays[b, h]] = part[0, 0]
        return replace(state, **out)


def test_the_kernel_obeys_the_law_of_fast_paths():
    check_backend(OnTriton(), DegreeWeightedMean(), "aggregate", 12)


@pytest.mark.parametrize(
    "law", [*aggregate_laws.AGGREGATOR_LAWS, aggregate_laws.keys_are_weighted_means], ids=lambda law: law.name
)
def test_the_kernel_obeys_the_laws_of_aggregators(law):
    law.check(OnTriton(), 5, fixed=False)  # large cases take the interpreter minutes; others here have many tiles


def merging(batch, heads, slots, leaving, evicted=0, hubs=None):
    """Random joins in which as many slots leave in every head."""
    joins = torch.arange(slots).repeat(batch, heads, 1)
    for head in joins.flatten(0, 1):
        order = torch.randperm(slots)
        stay = order[leaving:][:hubs]
        head[order[:leaving]] = stay[torch.randint(len(stay), (leaving,))]
        head[order[: min(evicted, leaving)]] = -1
    return joins


def tensors(slots, size, dtype, value_size=7, batch=2, heads=2):
    keys = torch.randn(batch, heads, slots, size).to(dtype)
    values = torch.randn(batch, heads, slots, value_size).to(dtype)
    degree = torch.randint(1, 300, (batch, heads, slots)).float()
    positions = torch.arange(slots).mul(3).expand(batch, heads, slots).contiguous()
    return keys, values, degree, positions


def expect_equal(inputs, joins):
    keys, values, degree, positions = inputs
    out = merge_triton(*inputs, joins)
    assignment = Assignment(joins).validate()
    whole = DegreeWeightedMean()(KVState(keys, values, degree, positions), assignment)
    stays = assignment.stays
    count = int(stays.sum(-1).max())
    wanted = [
        getattr(whole, name)[stays].unflatten(0, (*keys.shape[:2], count))
        for name in ("keys", "values", "degree", "positions")
    ]
    assert all(
        x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous() for x, y in zip(out, wanted, strict=True)
    )
    assert out[2].equal(wanted[2])
    assert out[3].equal(wanted[3])
    lone = (torch.zeros_like(degree).scatter_add(-1, joins.clamp(min=0), (joins >= 0).float()) == 1)[stays].view(
        out[2].shape
    )
    for x, y in zip(out[:2], wanted[:2], strict=True):
        eps = torch.finfo(x.dtype).eps
        assert ((x.double() - y.double()).abs() <= 4 * eps * keys.double().abs().max().clamp(min=4)).all()
        bits = torch.int32 if x.dtype == torch.float32 else torch.int16
        assert x[lone].view(bits).equal(y[lone].view(bits))
    return out


@given(
    slots=st.integers(1, 40),
    percent=st.integers(0, 99),
    size=st.sampled_from([1, 5, 24, 96]),
    value_size=st.sampled_from([3, 16, 40]),
    dtype=st.sampled_from(DTYPES),
    evicted=st.integers(0, 3),
    hubs=st.sampled_from([1, 2, None]),
)
@settings(max_examples=12)
def test_keys_values_degrees_and_positions_are_the_references(slots, percent, size, value_size, dtype, evicted, hubs):
    inputs = tensors(slots, size, dtype, value_size)
    joins = merging(2, 2, slots, slots * percent // 100, evicted, hubs)
    expect_equal([inside_nan(x) for x in inputs], inside_nan(joins))


def test_lone_slots_keep_every_bit():
    inputs = tensors(12, 8, torch.bfloat16)
    inputs[0][:, :, ::2] = -0.0
    inputs[0][:, :, 1, 0] = 3e38
    expect_equal(inputs, torch.arange(12).repeat(2, 2, 1))


def test_merging_equal_rows_changes_no_bit():
    keys, values, degree, positions = tensors(20, 24, torch.float32)
    keys, values = keys[:, :, :1].expand(keys.shape), values[:, :, :1].expand(values.shape)
    out = merge_triton(keys, values, degree, positions, merging(2, 2, 20, 13))
    assert out[0].equal(keys[:, :, :7])
    assert out[1].equal(values[:, :, :7])


def test_everything_joins_one():
    joins = torch.full((2, 2, 33), 32)
    out = expect_equal(tensors(33, 96, torch.float16), joins)
    assert out[3].eq(96).all()


def test_large_degrees_are_summed_exactly():
    keys, values, _, positions = tensors(3, 4, torch.bfloat16)
    degree = torch.tensor([100_000.0, 1.0, 70_001.0]).expand(2, 2, 3)
    out = merge_triton(keys, values, degree, positions, torch.tensor([1, 1, 1]).expand(2, 2, 3))
    assert out[2].eq(170_002).all()


def test_positions_keep_their_type():
    keys, values, degree, positions = tensors(9, 4, torch.float32)
    out = expect_equal((keys, values, degree, positions.int()), merging(2, 2, 9, 4))
    assert out[3].dtype == torch.int32


def test_the_same_input_gives_the_same_bits():
    inputs, joins = tensors(40, 24, torch.float32), merging(2, 2, 40, 30, hubs=3)
    assert all(x.equal(y) for x, y in zip(merge_triton(*inputs, joins), merge_triton(*inputs, joins), strict=True))


def test_places_beyond_32_bits():
    keys, values, degree, positions = tensors(5, 8, torch.bfloat16, batch=1, heads=1)
    joins = torch.tensor([[[1, 1, 2, 4, 4]]])
    near = merge_triton(keys, values, degree, positions, joins)
    far = merge_triton(far_apart(keys), far_apart(values), degree, positions, joins)
    assert all(x.equal(y) for x, y in zip(near, far, strict=True))


def test_nothing_left_and_nothing_there():
    assert merge_triton(*tensors(3, 4, torch.float32), torch.full((2, 2, 3), -1))[0].shape == (2, 2, 0, 4)
    assert merge_triton(*tensors(0, 4, torch.float32), torch.empty(2, 2, 0).long())[1].shape == (2, 2, 0, 7)


def test_heads_that_keep_different_numbers_are_refused():
    joins = torch.tensor([[[0, 0, 2], [0, 1, 2]]])
    with pytest.raises(BackendError, match="2 to 3"):
        merge_triton(*tensors(3, 4, torch.float32, batch=1), joins)


@pytest.mark.parametrize(
    ("index", "change", "error", "says"),
    [
        (0, torch.Tensor.double, DtypeError, "float64"),
        (1, torch.Tensor.half, ShapeError, "agree in type"),
        (1, lambda x: x[:, :, :3], ShapeError, "agree"),
        (0, lambda x: x.repeat(1, 1, 1, 70), BackendError, "280"),
        (2, torch.Tensor.double, DtypeError, "degree must be torch.float32"),
        (3, torch.Tensor.float, DtypeError, "positions"),
        (4, torch.Tensor.int, ShapeError, "joins must be int64"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(index, change, error, says):
    inputs = [*tensors(4, 4, torch.float32), merging(2, 2, 4, 1)]
    inputs[index] = change(inputs[index])
    with pytest.raises(error, match=says):
        merge_triton(*inputs)
