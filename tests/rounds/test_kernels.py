"""Rounds by kernels, in Triton's interpreter or on a GPU, against the stages carried out one by one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import BackendError
from centroidkv.kernels import why_not_triton
from centroidkv.matching import BipartiteSoftMatching, KMeans
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.rounds import TRITON, kernels
from centroidkv.schedule import LinearAnnealing
from centroidkv.testing.strategies import states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(why_not_triton(DEVICE) is not None, reason=str(why_not_triton(DEVICE)))


def build(rank, chunk):
    builder = Compressor.builder().preserve(Sinks(1), Recent(2)).partition(Alternating(chunk)).budget(0.4)
    return builder.matching(BipartiteSoftMatching(rank)).schedule(LinearAnnealing(0.3, 0.05)).build("triton")


@needs_triton
@settings(max_examples=12)
@given(
    case=states(most=40, kinds=("gaussian", "rotary"), padded=True),
    rank=st.sampled_from(["sequence", "chunk"]),
    chunk=st.integers(2, 17),
    named=st.booleans(),
)
def test_equals_the_reference(case, rank, chunk, named):
    state = case.state()
    if named:
        state = replace(state, slot_data={"place": state.positions.clone(), "importance": state.degree * 2})
    fast = build(rank, chunk)
    ours, theirs = fast(state, strict=False), replace(fast, backend="reference")(state, strict=False)
    assert ours.degree.equal(theirs.degree)
    assert ours.positions.equal(theirs.positions)
    close = {"rtol": 2e-2 if ours.keys.dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours.keys, theirs.keys, **close)
    torch.testing.assert_close(ours.values, theirs.values, **close)
    for name, data in theirs.slot_data.items():
        torch.testing.assert_close(ours.slot_data[name], data)


@needs_triton
def test_a_chunk_too_long_for_one_program_takes_two_kernels(make_state, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST_FUSED_CHUNK", 8)
    fast = build("chunk", 16)
    state = make_state(60)
    assert fast(state).positions.equal(replace(fast, backend="reference")(state).positions)


def test_stages_without_kernels_are_refused_by_name():
    with pytest.raises(BackendError, match="KMeans"):
        Compressor.builder().matching(KMeans()).build(backend="triton")
    balanced = presets.balanced(0.5)
    builder = Compressor.builder().similarity(balanced.similarity).matching(balanced.matching)
    with pytest.raises(BackendError, match="WardMatching"):
        builder.build(backend="triton")


def test_without_triton_or_gpu_the_reason_is_given(make_state, monkeypatch):
    compressor = Compressor.builder().preserve().budget(Budget.ratio(0.5)).build(backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="on the CPU"):
        compressor(make_state(40))


def test_auto_on_a_gpu_takes_kernels_where_there_are_some(monkeypatch, make_state):
    assert presets.centroidkv().runs_on("cuda") == "triton"
    assert presets.balanced().runs_on("cuda") == "reference"
    assert presets.kmeans().runs_on("cuda") == "reference"
    assert TRITON.why_not_these(make_state(5)) is None
    assert "float64" in TRITON.why_not_these(make_state(5, dtype=torch.float64))
    assert "300" in TRITON.why_not_these(make_state(5, size=300))
