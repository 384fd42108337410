"""Buffers of constant size: the same results as a growing state, step by step."""

from __future__ import annotations

import copy

import pytest
import torch

from centroidkv import Budget, Compressor, presets
from centroidkv.cache import FixedState, GrowingState, fixed
from centroidkv.errors import BudgetError, CacheError, DtypeError, NonFiniteError, SavedCacheError, StageError
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import LinearAnnealing


def compressor(budget=24, **options):
    builder = Compressor.builder().preserve(Sinks(2), Recent(8)).budget(Budget.tokens(budget))
    for name, value in options.items():
        builder = getattr(builder, name)(value)
    return builder.build()


def tokens(count, batch=1, heads=2, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, heads, count, size, generator=generator)


def fed(prompt, steps, real=None, fixed=None, small=None):
    """A growing and a fixed state after the same prompt and single tokens."""
    growing = GrowingState(small or compressor(), 8)
    fixed = fixed or FixedState(small or compressor(), 8)
    for state in (growing, fixed):
        state.append(*prompt, real)
    for step in range(steps):
        new = tokens(1, batch=prompt.shape[1], seed=step)
        growing.append(*new)
        fixed.begin(1)
        fixed.step(*new)
    return growing, fixed


def assert_equal(fixed, growing):
    a, b = fixed.state, growing.state
    wide, narrow = (b, a) if b.slots > a.slots else (a, b)
    extra = wide.slots - narrow.slots  # a growing state keeps columns of padding until its next event
    assert not wide.degree[:, :, :extra].any()
    for name in ("keys", "values", "degree", "positions"):
        assert torch.equal(getattr(wide, name)[:, :, extra:], getattr(narrow, name)), name
    assert torch.equal(a.seen, b.seen)
    assert (fixed.logical, fixed.events, a.rounds) == (growing.logical, growing.events, b.rounds)


@pytest.mark.parametrize("length", [1, 2, 7, 24, 25, 100])
@pytest.mark.parametrize("steps", [0, 1, 7, 8, 9, 40])
def test_equals_a_growing_state_bit_by_bit(length, steps):
    growing, fixed = fed(tokens(length), steps)
    assert_equal(fixed, growing)


@pytest.mark.parametrize("steps", [1, 9, 40])
@pytest.mark.parametrize("padding", [3, 20])
def test_padded_rows_have_their_own_clocks(steps, padding):
    real = torch.ones(2, 30, dtype=torch.bool)
    real[1, :padding] = False
    growing, fixed = fed(tokens(30, batch=2), steps, real)
    assert_equal(fixed, growing)


@pytest.mark.parametrize("preset", ["streaming_llm", "knorm", "kmeans", "tome"])
def test_presets_equal_a_growing_state(preset):
    growing, fixed = fed(tokens(90), 30, small=presets.ALL[preset](Budget.tokens(72)))
    assert_equal(fixed, growing)


def test_bytes_and_addresses_are_constant():
    fixed = FixedState(compressor(), 8)
    fixed.append(*tokens(100))
    addresses, size = [x.data_ptr() for x in fixed.slots.tensors], fixed.nbytes
    for step in range(60):
        fixed.begin(1)
        keys, values, degree = fixed.step(*tokens(1, seed=step))
        assert keys.shape[2] == values.shape[2] == degree.shape[2] == fixed.capacity == 32
        assert degree.sum(-1).eq(100 + step + 1).all()
    fixed.append(*tokens(50))
    fixed.reorder(torch.tensor([0]))
    assert [x.data_ptr() for x in fixed.slots.tensors] == addresses
    assert fixed.nbytes == size
    assert fixed.events > 5


def test_pieces_beams_and_copies_go_on_as_a_growing_state():
    growing, fixed = fed(tokens(50, batch=2), 5)
    for state in (growing, fixed):
        state.append(*tokens(12, batch=2, seed=7))
        state.reorder(torch.tensor([1, 1]))
        state.append(*tokens(2, batch=2, seed=8))
        state.crop(1)
    assert_equal(fixed, growing)
    twin = copy.deepcopy(fixed)
    new = tokens(1, batch=2, seed=9)
    growing.append(*new)
    twin.step(*new)
    assert_equal(twin, growing)
    assert fixed.logical == growing.logical - 1
    for state in (growing, fixed):
        state.reorder(torch.tensor([0]))  # fewer rows: new buffers
    assert fixed.slots.keys.shape[0] == 1


def test_a_restored_state_goes_on():
    small = compressor()(GrowingState(compressor(), 8)._grow(*tokens(100), None).state())
    growing, fixed = GrowingState(compressor(), 8), FixedState(compressor(), 8)
    for state in (growing, fixed):
        state.restore(small, 100)
    new = tokens(1)
    growing.append(*new)
    fixed.step(*new)
    assert_equal(fixed, growing)


def test_steps_that_were_never_announced_are_refused_not_clustered_late():
    fixed = FixedState(compressor(), 8)
    fixed.append(*tokens(100))
    for step in range(8):
        fixed.step(*tokens(1, seed=step))
    with pytest.raises(RuntimeError, match="all 32 slots are taken"):
        fixed.step(*tokens(1))
    late = FixedState(compressor(), 8)
    late.append(*tokens(20))  # clustering is due after 5 tokens, and there is room for 12
    late.begin(6)  # as if announced only once
    for step in range(6):
        late.step(*tokens(1, seed=step))
    with pytest.raises(CacheError, match=r"6 tokens were written.*due after 5"):
        late.begin(1)


def test_announcing_too_often_does_no_harm():
    growing, fixed = fed(tokens(100), 5)
    for _ in range(50):
        fixed.begin(1)
    assert_equal(fixed, growing)


def test_what_cannot_be_of_fixed_size_is_refused_by_name():
    with pytest.raises(BudgetError, match=r"Budget\.ratio"):
        FixedState(Compressor.builder().preserve(Sinks(2)).budget(0.5).build(), 8)
    with pytest.raises(StageError, match="queries"):
        FixedState(presets.balanced(Budget.tokens(128)), 8)
    with pytest.raises(StageError, match="interval"):
        FixedState(compressor(), 0)
    stops_early = compressor(schedule=LinearAnnealing(initial=0.1, delta=0.1, minimum=0))
    with pytest.raises(BudgetError, match=r"over its Budget\.tokens"):
        FixedState(stops_early, 100)
    late = FixedState(compressor(schedule=LinearAnnealing(initial=0.3, delta=0.1, minimum=0)), 8)
    with pytest.raises(CacheError, match="did not come down to its budget"):
        late.append(*tokens(300))
    fixed = FixedState(compressor(), 8)
    with pytest.raises(CacheError, match="nothing yet"):
        fixed.step(*tokens(1))
    fixed.append(*tokens(40))
    with pytest.raises(CacheError, match="1 rows of 2 KV heads"):
        fixed.step(*tokens(1, batch=2))
    with pytest.raises(DtypeError, match="bfloat16"):
        fixed.step(*tokens(1).bfloat16())
    with pytest.raises(SavedCacheError, match="growing"):
        fixed.pack()


def test_an_event_that_fails_leaves_everything_as_it_was():
    _, fixed = fed(tokens(100), 7)
    bad = tokens(1) * torch.inf
    fixed.begin(1)
    fixed.step(*bad)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            fixed.settle()
    fixed.slots.keys.nan_to_num_()
    assert fixed.slots.cursor.item() == 32


@pytest.mark.parametrize("where", ["append", "reorder", "crop"])
def test_whatever_interrupts_a_change_buffers_and_what_is_kept_tell_the_same(where, monkeypatch):
    keys = torch.randn(2, 2, 40, 16)
    layer = FixedState(presets.centroidkv(Budget.tokens(100)).with_(preserve=()), 8)
    layer.append(keys[:, :, :30], keys[:, :, :30])
    before = [x.clone() for x in (layer.state.keys, layer.state.degree, layer.slots.cursor)]
    plain = getattr(GrowingState, where)

    def stopped(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingState, where, stopped)
    change = {
        "append": lambda: layer.append(keys[:, :, :3], keys[:, :, :3]),
        "crop": lambda: layer.crop(2),
        "reorder": lambda: layer.reorder(torch.tensor([1, 0])),
    }
    with pytest.raises(KeyboardInterrupt):
        change[where]()
    monkeypatch.undo()
    assert layer.logical == 30
    for old, now in zip(before, (layer.state.keys, layer.state.degree, layer.slots.cursor), strict=True):
        assert now.equal(old)
    layer.begin(1)
    layer.step(keys[:, :, :1], keys[:, :, :1])
    assert layer.logical == 31


def test_an_interrupt_while_buffers_are_written_is_said(monkeypatch):
    keys = torch.randn(2, 2, 40, 16)
    layer = FixedState(presets.centroidkv(Budget.tokens(100)).with_(preserve=()), 8)
    layer.append(keys[:, :, :30], keys[:, :, :30])

    def stopped(state):
        raise KeyboardInterrupt

    monkeypatch.setattr(fixed, "tensors_of", stopped)
    with pytest.raises(KeyboardInterrupt):
        layer.append(keys[:, :, :3], keys[:, :, :3])
    monkeypatch.undo()
    with pytest.raises(CacheError, match=r"reset\(\)"):
        layer.append(keys[:, :, :3], keys[:, :, :3])
    layer.clear()
    layer.append(keys[:, :, :3], keys[:, :, :3])
    assert layer.logical == 3


def test_a_crop_of_columns_that_have_no_slot_leaves_nothing_behind():
    """Buffers hold no padding: three columns are two slots, and all three are taken back."""
    layer = FixedState(compressor(), 8)
    keys = torch.randn(1, 2, 3, 8)
    layer.append(keys, keys, torch.tensor([[False, True, True]]))
    layer.crop(3)
    assert (layer.logical, layer.physical, layer.state.seen.tolist()) == (0, 0, [0])
    shown, _, degree = layer.append(keys, keys, degrees=True)
    assert shown[degree > 0].view(keys.shape).equal(keys)


@pytest.mark.parametrize("what", ["append", "settle", "reorder", "crop"])
def test_an_interrupt_after_the_buffers_were_written_is_said(what, monkeypatch):
    """Everything is in the buffers, and the call has not returned: going on must not count otherwise than they do."""
    layer = FixedState(compressor(), 8)
    layer.append(*(torch.randn(2, 2, 30, 8) for _ in "kv"))
    for _ in range(8 if what == "settle" else 2):
        layer.step(*(torch.randn(2, 2, 1, 8) for _ in "kv"))
    plain = FixedState._store

    def interrupted(self):
        plain(self)
        raise KeyboardInterrupt

    change = {
        "append": lambda: layer.append(*(torch.randn(2, 2, 3, 8) for _ in "kv")),
        "settle": layer.settle,
        "reorder": lambda: layer.reorder(torch.tensor([1, 0])),
        "crop": lambda: layer.crop(1),
    }[what]
    with monkeypatch.context() as patch:
        patch.setattr(FixedState, "_store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            change()
    with pytest.raises(CacheError, match=r"reset\(\)"):
        layer.append(*(torch.randn(2, 2, 1, 8) for _ in "kv"))
    layer.clear()
    layer.append(*(torch.randn(1, 2, 30, 8) for _ in "kv"))
    assert layer.logical == 30
