"""Errors of attention outputs: every preset is measured, and nothing is lost where nothing is compressed."""

from __future__ import annotations

import pytest
import torch

from analysis.reproduce.attention_error import BUDGETS, PRESETS, QUERIES, bound_tightness, layer_error
from analysis.reproduce.capture import Layer, asked
from centroidkv import KVState, Rotary
from centroidkv.queries import QUERIES as SAMPLED

ROTARY = Rotary.from_theta(1e4, 16)


@pytest.fixture
def layer():
    draw = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, 640 + QUERIES, 16, generator=draw) for heads in (4, 2, 2))
    return Layer(queries, keys, values, scale=0.25)


@pytest.mark.parametrize("preset", PRESETS)
def test_less_room_costs_more_and_all_of_it_nothing(layer, preset):
    errors = [float(layer_error(layer, preset, budget, ROTARY).mean()) for budget in (1.0, *BUDGETS)]
    assert errors[0] < 1e-5
    assert 1e-3 < errors[1] < errors[-1]


def test_no_merge_exceeds_its_bound(layer):
    assert bound_tightness(layer, merges=8).max() <= 1 + 1e-6


def test_a_sample_is_of_queries_as_they_were_before_rope(layer):
    state = KVState.from_kv(layer.keys, layer.values, rotary=ROTARY)
    found = asked(state, ROTARY.rotate(layer.query, torch.arange(640 + QUERIES).expand(layer.query.shape[:3])))
    sample = found.head_data[SAMPLED]
    own = layer.query[0, :2].flatten(0, 1)
    gaps = torch.cdist(sample[0, 0], own, compute_mode="donot_use_mm_for_euclid_dist").min(-1).values
    assert gaps.max() < 1e-4
    with pytest.raises(ValueError, match="no rotary"):
        asked(KVState.from_kv(layer.keys, layer.values), layer.query)
