from dataclasses import replace

import pytest
import torch

from centroidkv import KVState, Rotary
from centroidkv.errors import RotaryError, ShapeError
from centroidkv.queries import AHEAD, BLOCK, HORIZON, evenly, expected_attention, mean_moment, sample_queries


def test_evenly_covers_long_and_repeats_short_runs():
    assert evenly(1000, 4).tolist() == [0, 250, 500, 750]
    assert evenly(3, 6).tolist() == [0, 0, 1, 1, 2, 2]


def test_sampled_queries_stay_with_their_kv_head():
    queries = torch.arange(6.0).view(1, 6, 1, 1).expand(1, 6, 5, 2)
    sample = sample_queries(queries, heads=3, sample=4)
    assert sample.shape == (1, 3, 8, 2)
    assert sample[0, :, :, 0].unique(dim=1).tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("shape", [(1, 5, 4, 8), (1, 4, 0, 8), (4, 4, 8)])
def test_queries_of_another_shape_are_refused(shape):
    with pytest.raises(ShapeError, match=r"\[B, Hq, L, D\]"):
        sample_queries(torch.zeros(shape), heads=2)


def test_expected_attention_is_the_mean_softmax_of_moved_queries(make_state):
    state = make_state(21, queries=True)
    state = replace(state, degree=torch.randint(1, 5, state.degree.shape).float())
    state = replace(state, seen=state.degree[:, 0].sum(-1).long())
    found = expected_attention(state, None)
    for row in range(2):
        for head in range(2):
            query = state.head_data["queries"][row, head]
            place = torch.full((len(query),), int(state.seen[row]) + AHEAD)
            weights = (state.rotary.rotate(query, place) @ state.keys[row, head].T).exp() * state.degree[row, head]
            wanted = (weights / weights.sum(-1, keepdim=True)).mean(0)
            assert torch.allclose(found[row, head], wanted, atol=1e-5)


def test_blocks_do_not_change_expected_attention(make_state, monkeypatch):
    state = make_state(40, queries=True)
    whole = expected_attention(state, None)
    monkeypatch.setattr("centroidkv.queries.BLOCK", 100)
    assert torch.allclose(expected_attention(state, None), whole, atol=1e-6)
    assert BLOCK > 100


def test_the_moment_is_that_of_queries_averaged_over_the_horizon(make_state):
    state = make_state(9, queries=True)
    queries = state.head_data["queries"]
    steps = [state.rotary.rotate(queries, torch.full(queries.shape[:3], 9 + step)) for step in range(HORIZON)]
    mean = torch.stack(steps).double().mean(0)
    wanted = mean.mT @ mean / queries.shape[2]
    assert torch.allclose(mean_moment(state, None), wanted.float(), atol=1e-4)


def test_wrong_states_are_refused(make_state):
    state = make_state(9, queries=True)
    with pytest.raises(ShapeError, match="16"):
        mean_moment(replace(state, head_data={"queries": torch.zeros(2, 2, 3, 8)}), None)
    bare = KVState.from_kv(state.keys, state.values)
    with pytest.raises(RotaryError, match="from_theta"):
        mean_moment(replace(bare, head_data=state.head_data), None)


def test_partial_rotation_averages_only_what_turns():
    rotary = Rotary.from_theta(1e4, 4)
    queries = torch.randn(1, 1, 3, 6)
    ahead = rotary.rotate_ahead(queries, torch.tensor([7]), 5)
    assert ahead[..., 4:].equal(queries[..., 4:])
    assert not torch.allclose(ahead[..., :4], queries[..., :4])


def test_a_batch_of_no_rows_has_a_sample_of_no_rows():
    assert sample_queries(torch.randn(0, 4, 20, 16), 2, sample=8).shape == (0, 2, 16, 16)
