from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import KVState
from centroidkv.cache import Codes, Exact, Offloaded, Quantised, QuantisedState, quantise
from centroidkv.errors import NonFiniteError, StageError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
sizes = st.integers(1, 70)
bits = st.sampled_from((4, 8))
groups = st.integers(2, 40)


@st.composite
def numbers(draw):
    """Rows of numbers at very different scales and offsets, some of them constant."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scale = 10.0 ** draw(st.integers(-9, 3))
    offset = draw(st.sampled_from((0.0, 1.0, -300.0, 3e4)))
    x = torch.randn(3, draw(sizes), generator=generator, dtype=torch.float64) * scale + offset
    x[draw(st.integers(0, 2))] = offset
    return x.to(dtype)


@given(numbers(), bits, groups, st.booleans())
def test_every_number_is_within_half_a_step(x, bits, group, nested):
    codes = Codes.encode(x, bits, group, nested=nested)
    error = (codes.decode().double() - x.double()).abs()
    assert bool((error <= codes.bound()).all()), (error - codes.bound()).max()


@given(st.integers(0, 10**6), sizes, bits, groups)
def test_in_double_precision_the_bound_is_half_a_step(seed, length, bits, group):
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codes = Codes.encode(x, bits, group)
    step = codes.step.repeat_interleave(group, -1)[..., -length:]
    assert bool(((codes.decode() - x).abs() <= step / 2 * (1 + 1e-9)).all())
    low, high = x[..., -min(group, length) :].aminmax(dim=-1)
    assert torch.allclose(codes.step[..., -1], (high - low) / (2**bits - 1), rtol=1e-12)


@given(numbers(), bits, groups)
def test_on_nested_grids_quantising_again_changes_nothing(x, bits, group):
    once = Codes.encode(x, bits, group, nested=True)
    powers = torch.frexp(once.step)[0]
    assert bool(((powers == 0.5) | (once.step == 0)).all())
    settled = Codes.encode(once.decode(), bits, group, nested=True)  # the cast of x' may have rounded, once
    again = Codes.encode(settled.decode(), bits, group, nested=True)
    assert again.decode().equal(settled.decode())
    if x.dtype in (torch.float64, torch.float32) and bool((x.abs() <= 2**10).all()) and bool((x.abs() >= 1e-3).all()):
        assert settled.decode().equal(once.decode())


@given(st.integers(0, 10**6), bits, groups, groups)
def test_on_nested_grids_other_groups_move_a_number_by_at_most_half_their_own_step(seed, bits, group, other):
    x = torch.randn(1, 60, generator=torch.Generator().manual_seed(seed))
    once = Codes.encode(x, bits, group, nested=True).decode()
    codes = Codes.encode(once, bits, other, nested=True)
    step = codes.step.repeat_interleave(other, -1)[..., -60:]
    finer = step <= Codes.encode(x, bits, group, nested=True).step.repeat_interleave(group, -1)[..., -60:]
    moved = (codes.decode() - once).abs()
    assert bool((moved <= step / 2).all())
    assert not moved[finer].any()


@given(st.integers(0, 10**6), sizes, groups)
def test_padding_in_front_changes_no_code_behind_it(seed, length, group):
    x = torch.randn(1, length, generator=torch.Generator().manual_seed(seed))
    padded = torch.cat((torch.full((1, 9), 1e6), x), -1)
    live = torch.arange(length + 9) >= 9
    behind = Codes.encode(padded, 8, group, live).decode()[..., 9:]
    assert behind.equal(Codes.encode(x, 8, group).decode())


@given(st.lists(st.integers(0, 15), min_size=1, max_size=40), groups)
def test_four_bits_are_packed_two_per_byte_and_come_back(levels, group):
    codes = Codes.encode(torch.tensor([*levels, *[0, 15] * group], dtype=torch.float64), 4, group=10**6)
    assert codes.codes.untyped_storage().nbytes() == -(-(len(levels) + 2 * group) // 2)
    assert codes.decode().round().tolist() == [*levels, *[0, 15] * group]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_extremes_of_every_type_are_held(dtype, nested):
    limits = torch.finfo(dtype)
    wide = limits.max if dtype == torch.float16 else limits.max / 4.1  # float32 must hold the arithmetic
    for x in ([0.0, wide / 3, wide], [-1.0, -wide], [limits.max * 0.9, limits.max], [-limits.max, -limits.max * 0.9]):
        x = torch.tensor(x, dtype=dtype)
        codes = Codes.encode(x, 8, 4, nested=nested)
        assert bool(torch.isfinite(codes.decode()).all())
        assert bool(((codes.decode().double() - x.double()).abs() <= codes.bound()).all())
    tiny = torch.tensor([0.0, limits.smallest_normal * limits.eps], dtype=dtype)
    assert bool(((Codes.encode(tiny, 8, 4, nested=nested).decode() - tiny).abs() <= tiny[1]).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_where_they_are_live(make_state, bad):
    state = make_state(40)
    keys = state.keys.clone()
    keys[0, 0, 3, 2] = bad
    with pytest.raises(NonFiniteError, match="finite"):
        quantise(replace(state, keys=keys))
    degree = state.degree.clone()
    degree[0, 0, 3] = 0
    quantise(replace(state, keys=keys, degree=degree))
    wide = torch.tensor([-3e38, 3e38])
    with pytest.raises(NonFiniteError, match="wider group"):
        Codes.encode(wide, 8, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_state_keeps_everything_but_the_last_bits_of_keys_and_values(make_state, bits, dtype):
    state = make_state(77, dtype=dtype)
    state = replace(state, rounds=3, degree=state.degree * 5)
    small = quantise(state, bits, group=16)
    back = small.dequantise()
    assert isinstance(small, QuantisedState)
    for name in ("degree", "positions", "seen", "rotary", "rounds"):
        assert getattr(back, name) is getattr(state, name)
    for name, bound in zip(("keys", "values"), small.error_bound(), strict=True):
        x, y = getattr(state, name), getattr(back, name)
        assert x.dtype == y.dtype
        assert bool(((x.double() - y.double()).abs() <= bound).all())
    assert back.validate() is back


def test_bytes_are_those_of_the_codes(make_state):
    state = make_state(64, size=32, dtype=torch.bfloat16)
    for bits, per_number in ((8, 9), (4, 5)):
        small = quantise(state, bits, group=32)
        keys = small.keys
        assert 8 * (keys.codes.nbytes + keys.low.nbytes + keys.step.nbytes) == per_number * state.keys.numel()
    # values of 16 channels: groups of 16
    held = Quantised(4).put(state)
    assert held.nbytes == small.nbytes + state.seen.nbytes
    assert held.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in held.tensors.values())


def test_channels_do_not_coarsen_each_other(make_state):
    """The reason for grouping keys by channel: one channel a thousand times larger leaves the others exact."""
    state = make_state(64)
    keys = state.keys.clone()
    keys[..., 5] = keys[..., 5] * 10 + 1000
    back = quantise(replace(state, keys=keys)).dequantise().keys
    others = [channel for channel in range(16) if channel != 5]
    assert (back - keys)[..., others].abs().max() < 0.02  # one group per token would make it 4


@pytest.mark.parametrize(
    "storage", [Exact(), Quantised(8), Quantised(4, group=8, nested=True), Offloaded(Quantised(4))]
)
def test_a_storage_gives_back_what_quantise_says(make_state, storage):
    state = make_state(50, queries=True)
    held = storage.put(state)
    back = storage.get(storage.fetch(held, state.keys.device), state.keys.device)
    if isinstance(storage, Exact):
        expected = state
    elif isinstance(storage, Offloaded):
        expected = quantise(state, 4).dequantise()
    else:
        expected = quantise(state, storage.bits, storage.group, storage.nested).dequantise()
    for name in ("keys", "values", "degree", "positions", "seen"):
        assert getattr(back, name).equal(getattr(expected, name)), name
    assert back.head_data["queries"].equal(state.head_data["queries"])
    assert back.rounds == state.rounds


@pytest.mark.parametrize("slots", [0, 1, 2, 31, 32, 33])
@pytest.mark.parametrize("bits", [4, 8])
def test_any_length(slots, bits):
    state = KVState.from_kv(torch.randn(1, 2, slots, 7), torch.randn(1, 2, slots, 5))
    small = quantise(state, bits)
    assert (small.dequantise().keys.shape, small.dequantise().values.shape) == ((1, 2, slots, 7), (1, 2, slots, 5))
    assert bool(((small.dequantise().keys - state.keys).abs() <= small.error_bound()[0]).all())


def test_bad_settings_are_refused_at_once():
    with pytest.raises(StageError, match="4 or 8 bits, asked for 3"):
        Quantised(bits=3)
    with pytest.raises(StageError, match="group"):
        Quantised(group=1)
    with pytest.raises(StageError, match="takes a storage"):
        Offloaded(8)
