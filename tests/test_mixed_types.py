"""Keys and values of different types, as autocast makes them: each kept in its own, everywhere in the core."""

from dataclasses import replace

import pytest
import torch

from centroidkv import Budget, Compressor, KVState, Rotary, native, presets
from centroidkv.attention import chosen_backend, degree_attention, paged_degree_attention
from centroidkv.cache.fixed import FixedState
from centroidkv.cache.growing import GrowingState
from centroidkv.cache.offloaded import Offloaded
from centroidkv.cache.quantised import Quantised
from centroidkv.errors import BackendError, DtypeError
from centroidkv.preserve import Sinks

PAIRS = [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16),
    (torch.float32, torch.float64), (torch.float64, torch.float16),
]  # fmt: skip
pairs = pytest.mark.parametrize(("keys", "values"), PAIRS)


def mixed(keys, values, slots=130):
    state = KVState.from_kv(
        torch.randn(1, 2, slots, 16).to(keys), torch.randn(1, 2, slots, 16).to(values),
        rotary=Rotary.from_theta(1e4, 16),
    )  # fmt: skip
    return replace(state, head_data={"queries": torch.randn(1, 2, 32, 16)})


@pairs
@pytest.mark.parametrize("name", sorted(presets.ALL))
def test_presets_keep_both_types_and_merge_each_as_alone(keys, values, name):
    state = mixed(keys, values)
    compressor = presets.ALL[name](0.6)
    both, reference = compressor(state), replace(compressor, backend="reference")(state)
    assert (both.keys.dtype, both.values.dtype) == (keys, values)
    assert both.positions.equal(reference.positions)
    bound = 2 * max(torch.finfo(keys).eps, torch.finfo(values).eps)
    assert torch.allclose(both.values.double(), reference.values.double(), atol=bound)
    if name in ("balanced",):
        return  # decides by values too, whose last digits a wider type has
    alone = compressor(replace(state, values=state.values.to(keys)))
    assert both.keys.equal(alone.keys)
    assert both.degree.equal(alone.degree)


@pairs
@pytest.mark.parametrize("storage", [None, Quantised(8), Offloaded(Quantised(4))], ids=str)
def test_growing_states_hold_pack_and_restore_both(keys, values, storage):
    def tokens(count):
        return torch.randn(2, 2, count, 16).to(keys), torch.randn(2, 2, count, 8).to(values)

    layer = GrowingState(presets.centroidkv(Budget.tokens(90)), 8, storage=storage)
    for count in (200, 1, 9, 1):
        found = layer.append(*tokens(count))
        assert (found[0].dtype, found[1].dtype) == (keys, values)
    assert layer.nbytes_full == 2 * 2 * 211 * (16 * keys.itemsize + 8 * values.itemsize)
    twin = GrowingState(layer.compressor, 8, storage=storage)
    twin.unpack(*layer.pack(), torch.device("cpu"))
    assert twin.state.keys.equal(layer.state.keys)
    assert twin.state.values.equal(layer.state.values)
    before = layer.state
    for change in (0, 1):
        new = list(tokens(1))
        new[change] = new[change].to(torch.float16 if new[change].dtype != torch.float16 else torch.float32)
        with pytest.raises(DtypeError, match=r"holds (keys|values) of"):
            layer.append(*new)
    assert layer.logical == 211
    assert layer.state.values.equal(before.values)


def test_fixed_states_hold_both_and_refuse_a_change_of_either():
    layer = FixedState(presets.centroidkv(Budget.tokens(90)), 8)
    layer.append(torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16).bfloat16())
    layer.begin(1)
    new = torch.randn(1, 2, 1, 16)
    assert [x.dtype for x in layer.step(new, new.bfloat16())] == [torch.float32, torch.bfloat16, torch.float32]
    for keys, values, name in ((new, new, "values"), (new.bfloat16(), new.bfloat16(), "keys")):
        with pytest.raises(DtypeError, match=f"holds {name} of"):
            layer.step(keys, values)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_back_ends_for_one_type_refuse_two_by_name(backend):
    if backend == "native" and native.why_not_native() is not None:
        pytest.skip(str(native.why_not_native()))
    state = mixed(torch.float32, torch.bfloat16)
    compressor = Compressor.builder().preserve(Sinks(1)).budget(0.5).build(backend)
    with pytest.raises(BackendError, match=rf"backend='{backend}' was asked for.*one type.*backend='auto'"):
        compressor(state)
    query = torch.randn(1, 4, 1, 16)
    if backend == "triton":
        with pytest.raises(BackendError, match="one type"):
            degree_attention(query, state.keys, state.values, state.degree, backend="triton")
    blocks = state.keys[0, :, :128].reshape(2, 8, 16, 16).permute(1, 2, 0, 3)
    table, lengths = torch.arange(8, dtype=torch.int32)[None], torch.tensor([100], dtype=torch.int32)
    rest = (torch.zeros(8, 16, 2), table, lengths)
    with pytest.raises(BackendError, match="one type"):
        paged_degree_attention(query[:, :, 0], blocks, blocks.bfloat16(), *rest, backend=backend)


@pairs
def test_attention_over_two_types_is_that_of_the_wider_one(keys, values):
    state, query = mixed(keys, values), torch.randn(1, 4, 3, 16).to(keys)
    degree = torch.randint(1, 50, state.degree.shape).float()
    exact = degree_attention(query.double(), state.keys.double(), state.values.double(), degree, backend="reference")
    assert chosen_backend(query, state.keys, state.values) == "sdpa"
    for backend in ("reference", "sdpa", "auto"):
        out = degree_attention(query, state.keys, state.values, degree, backend=backend)
        assert out.dtype == keys
        assert torch.allclose(out.double(), exact, atol=4 * torch.finfo(keys).eps + 1e-6)
    blocks = [x[0, :, :128].reshape(2, 8, 16, 16).permute(1, 2, 0, 3) for x in (state.keys, state.values)]
    log_degree = degree[0, :, :128].reshape(2, 8, 16).permute(1, 2, 0).log()
    rest = (log_degree, torch.arange(8, dtype=torch.int32)[None], torch.tensor([100], dtype=torch.int32))
    right = degree_attention(
        query[:, :, :1].double(), state.keys[:, :, :100].double(), state.values[:, :, :100].double(),
        degree[:, :, :100], backend="reference",
    )[:, :, 0]  # fmt: skip
    for backend in ("reference", "sdpa"):
        out = paged_degree_attention(query[:, :, 0], *blocks, *rest, backend=backend)
        assert out.dtype == keys
        assert torch.allclose(out.double(), right, atol=4 * torch.finfo(keys).eps + 1e-6)


def test_what_a_state_says_of_its_types():
    assert "float32 and bfloat16 on cpu" in repr(mixed(torch.float32, torch.bfloat16))
    assert "D=16, float32 on cpu" in repr(mixed(torch.float32, torch.float32))
