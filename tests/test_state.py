from dataclasses import replace

import pytest
import torch

from centroidkv import KVState
from centroidkv.errors import (
    CentroidKVError,
    DeviceError,
    DtypeError,
    MaskError,
    NonFiniteError,
    PositionOrderError,
    ShapeError,
)


def test_from_kv_makes_every_token_its_own_cluster(make_state):
    state = make_state(5)
    assert state.degree.tolist() == torch.ones(2, 2, 5).tolist()
    assert state.positions[1, 1].tolist() == [0, 1, 2, 3, 4]
    assert state.seen.tolist() == [5, 5]
    assert state.rounds == 0


def test_padding_has_degree_zero_and_real_tokens_count_from_zero(make_state):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    state = make_state(5, mask=mask)
    assert state.degree[:, 0].tolist() == mask.float().tolist()
    assert state.positions[0, 0].tolist() == [0, 0, 0, 1, 2]
    assert state.positions[1, 0].tolist() == [0, 1, 2, 2, 2]
    assert state.seen.tolist() == [3, 3]
    state.validate()


def test_seen_defaults_to_the_degrees_sum():
    keys = torch.randn(1, 1, 3, 4)
    positions = torch.arange(3).view(1, 1, 3)
    state = KVState(keys, keys, torch.tensor([[[1.0, 5.0, 2.0]]]), positions)
    assert state.seen.tolist() == [8]


def test_slot_and_head_data_travel_with_slots_and_rows(make_state):
    state = replace(
        make_state(4),
        slot_data={"score": torch.arange(16.0).view(2, 2, 4)},
        head_data={"query": torch.arange(12.0).view(2, 2, 3)},
    )
    picked = state.select(torch.tensor([3, 1]).expand(2, 2, 2)).rows(torch.tensor([1]))
    assert picked.slot_data["score"].tolist() == [[[11.0, 9.0], [15.0, 13.0]]]
    assert picked.head_data["query"].tolist() == [[[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]]


def test_nbytes_counts_all_per_slot_tensors(make_state):
    state = make_state(10, size=8)
    assert state.nbytes == 2 * 2 * 10 * (8 * 4 + 4 * 4 + 4 + 8)


BAD = {
    "rank": (lambda k, v: KVState.from_kv(k[0], v), ShapeError, r"\[B, H, T, D\]"),
    "slots differ": (lambda k, v: KVState.from_kv(k, v[:, :, 1:]), ShapeError, "agree"),
    "heads repeated": (lambda k, v: KVState.from_kv(k, v.repeat(1, 2, 1, 1)), ShapeError, "KV heads"),
    "mask shape": (lambda k, v: KVState.from_kv(k, v, torch.ones(2, 4)), ShapeError, "mask"),
    "values of whole numbers": (lambda k, v: KVState.from_kv(k, v.long()), DtypeError, "values must be floating point"),
    "keys of whole numbers": (lambda k, v: KVState.from_kv(k.int(), v), DtypeError, "keys must be floating point"),
    "additive mask": (lambda k, v: KVState.from_kv(k, v, torch.zeros(2, 5)), MaskError, "mask == 0"),
    "weights as mask": (lambda k, v: KVState.from_kv(k, v, torch.full((2, 5), 0.5).half()), MaskError, "float16"),
    "mask of other numbers": (lambda k, v: KVState.from_kv(k, v, torch.full((2, 5), 2)), MaskError, "0 and 1 only"),
    "additive mask of whole numbers": (
        lambda k, v: KVState.from_kv(k, v, torch.full((2, 5), -9999)),
        MaskError,
        "-9999",
    ),
    "integer keys": (lambda k, v: KVState.from_kv(k.long(), v.long()), DtypeError, "floating"),
    "mixed devices": (lambda k, v: KVState.from_kv(k, v.to("meta")), DeviceError, "one device"),
    "half degree": (
        lambda k, v: KVState(k, v, torch.ones(2, 2, 5).bfloat16(), torch.zeros(2, 2, 5).long()),
        DtypeError,
        "float32",
    ),
    "slot data": (
        lambda k, v: replace(KVState.from_kv(k, v), slot_data={"s": torch.zeros(2, 2, 4)}),
        ShapeError,
        "slot_data",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_layout_is_refused_by_name(name):
    build, error, message = BAD[name]
    with pytest.raises(error, match=message) as caught:
        build(torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4))
    assert isinstance(caught.value, CentroidKVError)


def test_validate_names_the_first_bad_slot(make_state):
    state = make_state(6)
    state.keys[1, 0, 3, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="row 1, head 0, slot 3"):
        state.validate()


def test_nan_in_padding_is_nobodys_business(make_state):
    state = make_state(4, mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    state.keys[0, :, 0] = float("nan")
    state.validate()


def test_huge_finite_keys_are_not_mistaken_for_infinity(make_state):
    state = make_state(4)
    state.keys.fill_(3e38)
    state.validate()


@pytest.mark.parametrize("positions", [[2, 1, 0], [0, 1, 1], [5, 6, 3]])
def test_unsorted_positions_are_refused(positions):
    keys = torch.randn(1, 1, 3, 4)
    state = KVState(keys, keys, torch.ones(1, 1, 3), torch.tensor(positions).view(1, 1, 3))
    with pytest.raises(PositionOrderError, match="sort"):
        state.validate()


def test_masks_of_whole_numbers_say_what_bools_say(make_state):
    real = torch.tensor([[False, True, True], [True, True, True]])
    for mask in (real, real.int(), real.long(), real.to(torch.uint8)):
        assert make_state(3, mask=mask).degree[:, 0].equal(real.float())


def test_large_finite_numbers_are_valid_though_their_sum_overflows():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        big = torch.full((1, 1, 9, 4), torch.finfo(dtype).max, dtype=dtype)
        assert KVState.from_kv(big, big).validate().slots == 9
        big[0, 0, 3, 1] = torch.inf
        with pytest.raises(NonFiniteError, match="slot 3"):
            KVState.from_kv(big.sign() * 1.0, big).validate()
