"""Growing states over every storage."""

from __future__ import annotations

import copy
import gc
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch

from centroidkv import Budget, Compressor, KVState, Rotary, presets
from centroidkv.cache import Exact, GrowingState, Offloaded, Quantised
from centroidkv.cache.stats import collect_stats
from centroidkv.cache.storage import Storage
from centroidkv.errors import CacheError, DtypeError, StageError
from centroidkv.preserve import Recent, Sinks

QUANTISED = [Quantised(8), Quantised(4, group=8, nested=True), Offloaded(Quantised(8))]
ALIKE = [Exact(), Offloaded()]
"""Storages that must not change a bit."""
FIELDS = ("keys", "values", "degree", "positions", "seen")


def compressor(budget=0.25):
    return Compressor.builder().preserve(Sinks(2), Recent(8)).budget(budget).build()


def tokens(count, batch=1, size=8, dtype=torch.float32):
    return torch.randn(batch, 2, count, size).to(dtype), torch.randn(batch, 2, count, size).to(dtype)


def steps(seed, lengths, batch=1):
    torch.manual_seed(seed)
    return [tokens(length, batch) for length in lengths]


def same(a: KVState, b: KVState):
    for name in FIELDS:
        assert getattr(a, name).equal(getattr(b, name)), name
    assert a.rounds == b.rounds


def live_equal(a: KVState, b: KVState):
    """Equal where slots are live; empty ones may hold anything."""
    assert a.degree.equal(b.degree)
    live = a.live
    for name in ("keys", "values", "positions"):
        assert getattr(a, name)[live].equal(getattr(b, name)[live]), name
    assert a.seen.equal(b.seen)


@pytest.mark.parametrize("storage", ALIKE, ids=repr)
def test_storages_that_change_nothing_change_nothing(storage):
    plain, stored = GrowingState(compressor(), 16), GrowingState(compressor(), 16, storage=storage)
    for keys, values in steps(0, (100, *[1] * 60, 30, 1)):
        stored.fetch()
        for one, two in zip(plain.append(keys, values), stored.append(keys, values), strict=True):
            assert (one is None and two is None) or one.equal(two)
        same(plain.state, stored.state)
        assert (plain.physical, plain.logical, plain.events) == (stored.physical, stored.logical, stored.events)
    assert stored.events > 3


@pytest.mark.parametrize("storage", ALIKE, ids=repr)
def test_rows_with_their_own_clocks_and_holes_stay_alike(storage):
    plain, stored = GrowingState(compressor(0.5), 8), GrowingState(compressor(0.5), 8, storage=storage)
    real = torch.ones(3, 60, dtype=torch.bool)
    real[1, :50], real[2, 20:30] = False, False
    holes = torch.ones(3, 5, dtype=torch.bool)
    holes[0, :3], holes[1, 2] = False, False
    masks = [real, None, None, holes, *[None] * 30]
    for (keys, values), mask in zip(steps(1, (60, 1, 2, 5, *[1] * 30), batch=3), masks, strict=True):
        one, two = plain.append(keys, values, mask), stored.append(keys, values, mask)
        assert one[0].shape == two[0].shape
        live_equal(plain.state, stored.state)
    assert {clock.events for clock in stored._clocks} != {stored.events}  # they did differ


@pytest.mark.parametrize("storage", QUANTISED, ids=repr)
def test_what_was_compressed_is_quantised_and_what_came_since_is_not(storage):
    layer = GrowingState(compressor(Budget.tokens(50)), 16, storage=storage)
    exact = GrowingState(compressor(Budget.tokens(50)), 16)
    keys, values = tokens(200)
    layer.append(keys, values)
    exact.append(keys, values)
    inside = getattr(storage, "inside", storage)
    expected = inside.get(inside.put(exact.state), torch.device("cpu"))
    assert layer.state.keys.equal(expected.keys)
    fresh = tokens(5)
    attended, _, degree = layer.append(*fresh)
    assert attended[:, :, -5:].equal(fresh[0])
    assert attended[:, :, :50].equal(expected.keys)
    assert degree.equal(torch.cat((exact.state.degree, torch.ones(1, 2, 5)), 2))
    assert layer.state.positions[0, 0, -5:].tolist() == [200, 201, 202, 203, 204]


@pytest.mark.parametrize("storage", QUANTISED, ids=repr)
def test_a_padded_row_is_quantised_as_it_would_be_alone(storage):
    lengths = (90, *[1] * 25)
    together, alone = (GrowingState(compressor(0.5), 8, storage=storage) for _ in range(2))
    real = torch.ones(2, 90, dtype=torch.bool)
    real[1, :41] = False
    for number, (keys, values) in enumerate(steps(2, lengths, batch=2)):
        together.append(keys, values, real if number == 0 else None)
        begin = 41 if number == 0 else 0
        alone.append(keys[1:, :, begin:], values[1:, :, begin:])
        both, one = together.state, alone.state
        live = both.live[1]
        assert both.keys[1][live].equal(one.keys[0][one.live[0]])
        assert both.degree[1][live].equal(one.degree[0][one.live[0]])


@pytest.mark.parametrize("storage", [None, *ALIKE, *QUANTISED], ids=repr)
def test_bytes_are_what_is_held_and_the_rest_is_freed(storage):
    layer = GrowingState(compressor(), 64, storage=storage)

    def alive():
        gc.collect()
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor and thing.device.type == "cpu":
                with suppress(RuntimeError):  # what a compiler left behind has no storage
                    yield thing.data_ptr(), thing.untyped_storage()

    def held():
        return sum({s.data_ptr(): s.nbytes() for pointer, s in alive() if pointer not in before}.values())

    before = {pointer for pointer, _ in alive()}
    layer.append(*tokens(400, size=32))
    for _ in range(10):
        layer.append(*tokens(1, size=32))
    nbytes = layer.nbytes
    assert nbytes <= held() <= nbytes + 64  # and a few numbers per row, such as the tokens seen
    full = 2 * 100 * (2 * 32 * 4 + 8)
    if storage is not None and "Quantised" in repr(storage):
        assert nbytes < full / 2
    assert collect_stats([layer]).bytes == nbytes


def test_four_bits_hold_less_than_eight_and_eight_less_than_all():
    sizes = []
    for storage in (None, Quantised(8), Quantised(4)):
        layer = GrowingState(compressor(), 64, storage=storage)
        layer.append(*tokens(400, size=64, dtype=torch.bfloat16))
        sizes.append(layer.nbytes)
    full, eight, four = sizes
    numbers = 2 * 100 * 2 * 64
    assert full == numbers * 2 + 2 * 100 * 8
    lows = 2 * 2 * (2 * 64 * 4 + 2 * 100 * 2)  # two bytes each: of 4 groups of slots, and of 2 of channels
    assert (eight, four) == (numbers + 1608 + lows, numbers // 2 + 1608 + lows)  # 1608: degrees, positions, seen


@pytest.mark.parametrize("storage", [*ALIKE, *QUANTISED], ids=repr)
def test_a_failed_append_changes_nothing(storage):
    layer = GrowingState(compressor(Budget.tokens(20)), 10, storage=storage)
    layer.append(*tokens(60))
    layer.append(*tokens(5))
    before, facts = layer.state, (layer._kept, layer._clocks, layer.logical, layer.events, layer.nbytes)
    keys, values = tokens(10)
    keys[0, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.append(keys, values)
    assert (layer._kept, layer._clocks, layer.logical, layer.events, layer.nbytes) == facts
    same(layer.state, before)
    layer.append(*tokens(10))
    assert layer.logical == 75


def test_a_storage_that_fails_changes_nothing():
    @dataclass(frozen=True)
    class Full(Storage):
        inside: Storage = field(default_factory=Exact)
        left: list[int] = field(default_factory=lambda: [1])

        def put(self, state):
            if not self.left:
                raise OSError("no space")
            self.left.pop()
            return self.inside.put(state)

        def get(self, held, device):
            return self.inside.get(held, device)

    layer = GrowingState(compressor(Budget.tokens(20)), 10, storage=Full())
    layer.append(*tokens(60))
    before = (layer._kept, layer._clocks, layer.logical)
    with pytest.raises(OSError, match="no space"):
        layer.append(*tokens(10))
    assert (layer._kept, layer._clocks, layer.logical) == before


@pytest.mark.parametrize("storage", [*ALIKE, *QUANTISED], ids=repr)
def test_rows_move_together_and_share_until_they_part(storage):
    layer = GrowingState(compressor(Budget.tokens(20)), 50, storage=storage)
    layer.append(*tokens(60, batch=3))
    layer.append(*tokens(4, batch=3))
    before, one_row = layer.state, layer.nbytes // 3
    layer.reorder(torch.tensor([2, 0, 0]))
    same(layer.state, before.rows(torch.tensor([2, 0, 0])))
    assert layer.nbytes == 2 * one_row
    layer.append(*tokens(1, batch=3))
    assert layer.nbytes > 2 * one_row
    assert not layer.state.keys[1].equal(layer.state.keys[2])


@pytest.mark.parametrize("storage", [*ALIKE, *QUANTISED], ids=repr)
def test_crop_takes_back_what_was_not_clustered(storage):
    layer = GrowingState(compressor(Budget.tokens(20)), 50, storage=storage)
    layer.append(*tokens(100))
    kept = layer.state
    layer.append(*tokens(7))
    layer.crop(3)
    assert (layer.logical, layer.physical) == (104, 24)
    layer.crop(4)
    same(layer.state, kept)
    assert layer.state.seen.tolist() == [100]
    with pytest.raises(CacheError, match="merged tokens cannot be separated"):
        layer.crop(1)
    layer.append(*tokens(2))
    assert layer.state.positions[0, 0, -2:].tolist() == [100, 101]


@pytest.mark.parametrize("storage", [*ALIKE, *QUANTISED], ids=repr)
def test_crop_before_the_first_event_takes_back_anything(storage):
    layer = GrowingState(compressor(Budget.tokens(200)), 50, storage=storage)
    layer.append(*tokens(100))
    layer.crop(100)
    assert (layer.logical, layer.physical) == (0, 0)
    layer.append(*tokens(3))
    assert layer.state.positions[0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("storage", [*ALIKE, *QUANTISED], ids=repr)
def test_a_copy_and_its_original_go_their_own_ways(storage):
    layer = GrowingState(compressor(Budget.tokens(20)), 10, storage=storage)
    layer.append(*tokens(60))
    layer.append(*tokens(3))
    twin, before = copy.deepcopy(layer), layer.state
    more = tokens(30)
    twin.append(*more)
    same(layer.state, before)
    layer.append(*more)
    same(layer.state, twin.state)


@pytest.mark.parametrize("storage", [None, *ALIKE, *QUANTISED], ids=repr)
def test_what_was_packed_goes_on_alike(storage):
    def make():
        return GrowingState(presets.balanced(30), 8, Rotary.from_theta(1e4, 8), storage)

    layer, real = make(), torch.ones(2, 60, dtype=torch.bool)
    real[1, :45] = False
    for number, (keys, values) in enumerate(steps(3, (60, 1, 1, 1), batch=2)):
        layer.append(keys, values, real if number == 0 else None, torch.randn(2, 4, keys.shape[2], 8))
    twin = make()
    twin.unpack(*layer.pack(), torch.device("cpu"))
    facts = [(x.physical, x.logical, x.events, x._clocks) for x in (layer, twin)]
    assert facts[0] == facts[1]
    assert twin.nbytes <= layer.nbytes  # spare slots are not packed
    for keys, values in steps(4, [1] * 30, batch=2):
        queries = torch.randn(2, 4, 1, 8)
        one, two = layer.append(keys, values, None, queries), twin.append(keys, values, None, queries)
        assert all(a.equal(b) for a, b in zip(one, two, strict=True))
    same(layer.state, twin.state)


def test_what_was_packed_in_another_form_is_refused_and_offloading_is_no_form():
    layer = GrowingState(compressor(), 8, storage=Quantised(8))
    with pytest.raises(CacheError, match="nothing to pack"):
        layer.pack()
    layer.append(*tokens(60))
    packed = layer.pack()
    for other in (None, Quantised(4), Exact()):
        twin = GrowingState(compressor(), 8, storage=other)
        with pytest.raises(CacheError, match=r"Quantised\(bits=8"):
            twin.unpack(*packed, torch.device("cpu"))
        assert twin.state is None
    twin = GrowingState(compressor(), 8, storage=Offloaded(Quantised(8)))
    twin.unpack(*packed, torch.device("cpu"))
    same(twin.state, layer.state)


@pytest.mark.parametrize("storage", [None, *ALIKE, *QUANTISED], ids=repr)
def test_restore_goes_on_from_a_compressed_state(storage):
    keys, values = tokens(100)
    small = compressor()(KVState.from_kv(keys, values))
    layer = GrowingState(compressor(), 16, storage=storage)
    layer.restore(small, 100)
    assert (layer.logical, layer.physical, layer.events) == (100, 25, 1)
    layer.append(*tokens(1))
    assert layer.state.positions[0, 0, -1] == 100
    if storage in ALIKE:
        assert layer.state.keys[:, :, :25].equal(small.keys)


def test_what_is_fetched_is_used_once():
    @dataclass(frozen=True, eq=False)
    class Watched(Exact):
        seen: list = field(default_factory=list)

        def fetch(self, held, device):
            self.seen.append("fetch")
            return held.map(torch.clone)

        def get(self, held, device):
            self.seen.append(held)
            return super().get(held, device)

    storage = Watched()
    layer = GrowingState(compressor(Budget.tokens(20)), 10, storage=storage)
    layer.fetch()
    layer.append(*tokens(60))
    assert storage.seen == []
    layer.fetch()
    layer.fetch()
    layer.append(*tokens(1))
    assert storage.seen[0] == "fetch"
    assert len(storage.seen) == 2
    layer.append(*tokens(1))
    assert len(storage.seen) == 3
    assert storage.seen[1] is not storage.seen[2]


def test_other_storages_and_types_are_refused():
    with pytest.raises(StageError, match="storage must have put and get"):
        GrowingState(compressor(), 8, storage="int8")
    layer = GrowingState(compressor(), 8)
    layer.append(*tokens(5))
    with pytest.raises(DtypeError, match="bfloat16"):
        layer.append(*tokens(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_drift_of_preserved_slots_over_20_events_is_bounded(bits, dtype):
    """Sinks are dequantised and quantised again at each event; on nested grids the error stays below one step."""

    def errors(storage):
        torch.manual_seed(0)
        layer = GrowingState(
            Compressor.builder().preserve(Sinks(16), Recent(8)).budget(Budget.tokens(128)).build(), 16, storage=storage
        )
        first = tokens(200, size=64, dtype=dtype)
        layer.append(*first)
        out = []
        for _ in range(21):
            now = (layer.state.keys, layer.state.values)
            out.append([(a[:, :, :16] - b[:, :, :16]).abs().max().item() for a, b in zip(now, first, strict=True)])
            layer.append(*tokens(16, size=64, dtype=dtype))
        assert layer.events == 22
        return torch.tensor(out)

    step = 8 / (2**bits - 2)  # of a range of up to 8 (normal numbers within four deviations)
    nested = errors(Quantised(bits, nested=True))
    assert bool((nested < 2 * step).all())
    assert bool((nested[-1] <= 2 * nested[0]).all())
    tight = errors(Quantised(bits))
    assert bool((tight[0] <= nested[0] * 1.01).all())  # finer at first
    assert bool((tight[:, 1] <= 1.1 * tight[0, 1]).all())  # values keep their groups
    assert 2 * tight[0, 0] < tight[-1, 0] < 5 * tight[0, 0]  # keys get new neighbours
    assert tight[-1, 0] > nested[-1, 0]
