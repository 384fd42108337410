import copy
from dataclasses import replace

import torch

from centroidkv import KVState
from centroidkv.cache.room import SPARE, Room


def piece(slots, start=0, batch=2):
    state = KVState.from_kv(torch.randn(batch, 3, slots, 8), torch.randn(batch, 3, slots, 4))
    return replace(state, positions=state.positions + start)


def joined(states):
    return [torch.cat([getattr(s, name) for s in states], 2) for name in ("keys", "values", "degree", "positions")]


def expect_equal(state, pieces):
    for ours, theirs in zip((state.keys, state.values, state.degree, state.positions), joined(pieces), strict=True):
        assert torch.equal(ours, theirs)
    assert state.seen.tolist() == [sum(p.slots for p in pieces)] * state.batch


def test_growing_equals_concatenating_across_new_buffers():
    room, pieces = Room(), [piece(10)]
    state = pieces[0]
    for step in range(2 * SPARE + 5):
        pieces.append(piece(1 + step % 3, start=state.slots))
        state = room.extend(state, pieces[-1])
    expect_equal(state, pieces)


def test_buffers_are_reused_until_they_are_full():
    room = Room()
    state = room.extend(piece(10), piece(1, 10))
    where = state.keys.data_ptr()
    for step in range(SPARE):
        state = room.extend(state, piece(1, 11 + step))
        assert state.keys.data_ptr() == where
    assert room.extend(state, piece(1, state.slots)).keys.data_ptr() != where


def test_states_handed_out_never_change():
    room = Room()
    first = room.extend(piece(5), piece(1, 5))
    before = first.keys.clone()
    second = room.extend(first, piece(2, 6))
    other = room.extend(first, piece(1, 6))  # a step that is repeated after a failure starts from the old state
    assert torch.equal(first.keys, before)
    assert other.slots == 7
    assert second.slots == 8


def test_a_state_from_elsewhere_is_copied_first():
    room = Room()
    state = room.extend(piece(5), piece(1, 5))
    kept = state.keys.clone()
    swapped = state.rows(torch.tensor([1, 0]))
    grown = room.extend(swapped, piece(1, 6))
    assert torch.equal(grown.keys[:, :, :6], kept[[1, 0]])
    assert torch.equal(state.keys, kept)
    fewer = room.extend(grown.rows(torch.tensor([0])), piece(1, 7, batch=1))
    assert fewer.batch == 1


def test_a_deep_copy_has_buffers_of_its_own():
    room = Room()
    state = room.extend(piece(5), piece(1, 5))
    twin_room, twin = copy.deepcopy((room, state))
    ours, theirs = piece(1, 6), piece(1, 6)
    state, twin = room.extend(state, ours), twin_room.extend(twin, theirs)
    assert torch.equal(state.keys[:, :, -1:], ours.keys)
    assert torch.equal(twin.keys[:, :, -1:], theirs.keys)


def test_spare_slots_are_counted():
    room = Room()
    state = room.extend(piece(5), piece(1, 5))
    per_slot = state.nbytes // state.slots
    assert room.nbytes_behind(state) == SPARE * per_slot
    assert room.nbytes_behind(piece(6)) == 0
