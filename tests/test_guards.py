"""Gradients that would be lost, and what is in force around a call: autocast, a default device."""

import pytest
import torch

from centroidkv import Budget, Compressor, KVState, presets
from centroidkv.attention import degree_attention, paged_degree_attention
from centroidkv.cache import FixedState, GrowingState, Quantised
from centroidkv.errors import CentroidKVError, GradientError
from centroidkv.guards import refuse_gradients
from centroidkv.preserve import Recent, Sinks


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


@pytest.mark.parametrize("name", sorted(presets.ALL))
def test_another_default_device_changes_nothing(make_state, name):
    """As ``torch.set_default_device("cuda")`` with tensors on the processor; "meta" is one that every machine has."""
    compressor = presets.ALL[name](0.6)
    state = make_state(300, queries=compressor.needs_queries)
    alone = compressor(state)
    with torch.device("meta"):
        within = compressor(state)
    assert within.keys.equal(alone.keys)
    assert within.degree.equal(alone.degree)


def test_another_default_device_changes_nothing_in_a_cache_and_in_blocks():
    compressor = Compressor.builder().preserve(Sinks(2), Recent(8)).budget(Budget.tokens(40)).build()
    pieces = [torch.randn(2, 1, 2, n, 16) for n in (50, 1, 1, 20, 1)]
    blocks, table = torch.randn(3, 16, 2, 16), torch.tensor([[2, 0]], dtype=torch.int32)
    asked = (torch.randn(1, 4, 16), blocks, blocks, torch.zeros(3, 16, 2), table, torch.tensor([20], dtype=torch.int32))

    def run():
        growing, fixed = GrowingState(compressor, 16, storage=Quantised(8)), FixedState(compressor, 16)
        for keys, values in pieces:
            grown, kept = growing.append(keys, values), fixed.append(keys, values)
        return [*grown, *kept, paged_degree_attention(*asked, backend="sdpa")]

    alone = run()
    with torch.device("meta"):
        within = run()
    assert all(a.equal(b) for a, b in zip(alone, within, strict=True))


def test_the_reference_attends_in_float32_under_autocast():
    query, keys, degree = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 40, 16), torch.full((1, 2, 40), 3.0)
    alone = degree_attention(query, keys, keys, degree, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert degree_attention(query, keys, keys, degree, backend="reference").equal(alone)
