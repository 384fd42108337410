"""Gradients that would be lost."""

import pytest
import torch

from centroidkv import Compressor, KVState, presets
from centroidkv.errors import CentroidKVError, GradientError
from centroidkv.guards import refuse_gradients


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("name", ["centroidkv", "streaming_llm", "distinctive"])
def test_compressing_what_requires_a_gradient_is_refused(make_state, which, name):
    state = make_state(90)
    getattr(state, which).requires_grad_()
    with pytest.raises(GradientError, match=r"no_grad\(\).*detach\(\)") as caught:
        presets.ALL[name](0.9)(state)
    assert isinstance(caught.value, CentroidKVError)
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert presets.ALL[name](0.9)(state).slots == 81
    detached = KVState.from_kv(state.keys.detach(), state.values.detach(), rotary=state.rotary)
    assert presets.ALL[name](0.9)(detached).slots == 81


def test_also_where_nothing_would_be_compressed_and_along_a_graph(make_state):
    weight = torch.randn(16, 16, requires_grad=True)
    state = make_state(9)
    with pytest.raises(GradientError, match="compressing"):
        Compressor.builder().budget(1.0).build()(KVState.from_kv(state.keys @ weight, state.values))


def test_the_guard_names_who_would_lose_it():
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(GradientError, match="this cache passes no gradients on"):
        refuse_gradients("this cache", torch.zeros(2), x)
    with torch.no_grad():
        refuse_gradients("this cache", x)
    refuse_gradients("this cache", x.detach())


@pytest.mark.parametrize("heads", [1, 2])
def test_autocast_does_not_reach_into_a_compression(make_state, heads):
    state, compressor = make_state(300, batch=1, heads=heads), presets.centroidkv(0.5)
    alone = compressor(state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = compressor(state)
    assert within.keys.equal(alone.keys)
    assert within.degree.equal(alone.degree)
