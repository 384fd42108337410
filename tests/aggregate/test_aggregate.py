import pytest
import torch

from centroidkv import KVState
from centroidkv.aggregate import DegreeWeightedMean, KeepTargetKey
from centroidkv.records import Assignment


def state_of(values, degree, dtype=torch.float32):
    x = torch.tensor(values, dtype=dtype).view(1, 1, -1, 1)
    degree = torch.tensor(degree, dtype=torch.float32).view(1, 1, -1)
    return KVState(x, x.clone(), degree, torch.arange(x.shape[2]).view(1, 1, -1))


def test_the_mean_is_weighted_by_degree():
    merged = DegreeWeightedMean()(state_of([1.0, 4.0, 9.0], [3, 1, 1]), Assignment(torch.tensor([[[1, 1, 2]]])))
    assert merged.keys[0, 0, 1].item() == pytest.approx(1.75)
    assert merged.values[0, 0, 1].item() == pytest.approx(1.75)
    assert merged.degree[0, 0, 1:].tolist() == [4.0, 1.0]


def test_keep_target_key_averages_values_only():
    merged = KeepTargetKey()(state_of([1.0, 4.0], [3, 1]), Assignment(torch.tensor([[[1, 1]]])))
    assert merged.keys[0, 0, 1].item() == 4.0
    assert merged.values[0, 0, 1].item() == pytest.approx(1.75)
    assert merged.degree[0, 0, 1].item() == 4.0


@pytest.mark.parametrize("stage", [DegreeWeightedMean(), KeepTargetKey()])
def test_untouched_slots_are_bit_identical(stage, make_state):
    state = make_state(9, dtype=torch.bfloat16)
    state.degree[..., 5] = 3.0
    joins = torch.arange(9).repeat(2, 2, 1)
    joins[..., 0] = 1
    merged = stage(state, Assignment(joins))
    assert torch.equal(merged.keys[:, :, 2:], state.keys[:, :, 2:])
    assert torch.equal(merged.values[:, :, 2:], state.values[:, :, 2:])


def test_large_degrees_are_not_lost_in_bfloat16():
    state = state_of([1.0, 1.0], [4096, 1], torch.bfloat16)
    merged = DegreeWeightedMean()(state, Assignment(torch.tensor([[[0, 0]]])))
    assert merged.degree[0, 0, 0].item() == 4097.0


def test_many_small_contributions_add_up_in_float32():
    count = 2000
    state = state_of([0.0] + [1.0] * count, [1] * (count + 1), torch.bfloat16)
    merged = DegreeWeightedMean()(state, Assignment(torch.zeros(1, 1, count + 1, dtype=torch.long)))
    assert merged.keys[0, 0, 0].item() == pytest.approx(count / (count + 1), rel=2**-8)


def test_huge_keys_do_not_overflow_on_the_way():
    state = state_of([3e37] * 50, [100] * 50)
    merged = DegreeWeightedMean()(state, Assignment(torch.zeros(1, 1, 50, dtype=torch.long)))
    assert merged.keys[0, 0, 0].item() == pytest.approx(3e37)
