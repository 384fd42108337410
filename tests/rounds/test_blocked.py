"""Blocked rounds against the stages carried out one by one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv import Budget, Compressor, KVState
from centroidkv.errors import BackendError
from centroidkv.matching import BipartiteSoftMatching, WardMatching
from centroidkv.partition import Alternating, Halves
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.rounds import blocked
from centroidkv.rounds.blocked import blocked_rounds
from centroidkv.rounds.settings import Settings
from centroidkv.schedule import LinearAnnealing
from centroidkv.similarity import Cosine, Dot, ExpectedLogits
from centroidkv.testing import check_backend
from centroidkv.testing.strategies import StateCase, states
from tests.laws.stages import round_by_stages

WARD = {"similarity": ExpectedLogits(), "matching": WardMatching(passage=0.5)}
METHODS = {
    "sequence": {},
    "chunk": {"matching": BipartiteSoftMatching(rank="chunk")},
    "ward": WARD,
    "ward by degree": {"similarity": ExpectedLogits(), "matching": WardMatching("degree")},
}
# Kinds in which no two candidate edges are equally good: there a decision has one right answer.
UNEQUAL = ("gaussian", "rotary")


def build(method, chunk, preservers=(), rate=0.3, budget=0.3, backend="auto"):
    builder = Compressor.builder().preserve(*preservers).partition(Alternating(chunk)).budget(Budget.ratio(budget))
    for name, stage in METHODS[method].items():
        builder = getattr(builder, name)(stage)
    return builder.schedule(LinearAnnealing(rate, 0.02)).build(backend=backend)


def round_in_blocks(keys, values, degree, positions, chunk, quotas):
    state = KVState(keys, values, degree, positions)
    after = blocked_rounds(state, state.live, [keys.shape[2] - sum(quotas)], Settings.of(build("chunk", chunk).stages))
    return after.keys, after.values, after.degree, after.positions


def test_a_round_obeys_the_law_of_fast_paths():
    check_backend(round_in_blocks, round_by_stages, "round")


def expect_same(fast, reference, rounding=1e-2, place=1e-6):
    assert fast.degree.equal(reference.degree)
    assert fast.positions.equal(reference.positions)
    assert fast.rounds == reference.rounds
    rounded = fast.keys.dtype == torch.bfloat16
    close = {"rtol": rounding if rounded else 1e-5, "atol": place if rounded else 1e-6}
    torch.testing.assert_close(fast.keys, reference.keys, **close, equal_nan=True)
    torch.testing.assert_close(fast.values, reference.values, **close, equal_nan=True)
    assert fast.slot_data.keys() == reference.slot_data.keys()
    for name, data in fast.slot_data.items():
        torch.testing.assert_close(data, reference.slot_data[name])


@pytest.mark.parametrize("method", METHODS)
@given(
    case=states(least=0, most=60, kinds=UNEQUAL, padded=True, dtypes=("float32", "bfloat16", "float64")),
    chunk=st.integers(2, 17),
    rate=st.sampled_from([0.1, 0.3, 0.5]),
    budget=st.sampled_from([0.1, 0.4, 0.8, 1.0]),
    preserve=st.booleans(),
    group=st.sampled_from([1, 64, 10**6]),
)
def test_equals_the_reference(method, case, chunk, rate, budget, preserve, group):
    if method.startswith("ward") and case.size % 2:
        case = replace(case, size=8)
    preservers = (Sinks(2), Recent(3), Distinctive("low_norm", 0.3, rope="after")) if preserve else ()
    fast = build(method, chunk, preservers, rate, budget, "blocked")
    state = case.state()
    state = replace(state, slot_data={"token": torch.randn(*state.degree.shape, 2), "place": state.positions.clone()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK", group)  # heads one by one, and all at once
        ours = fast(state, strict=False)
    expect_same(ours, replace(fast, backend="reference")(state, strict=False))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["sequence", "chunk", "ward"])
def test_many_chunks_moves_in_place_and_threads(method, monkeypatch, two_threads):
    monkeypatch.setattr(blocked, "MOVE", 100)
    monkeypatch.setattr(blocked, "BLOCK", 2000)
    state = StateCase(slots=1501, kind="rotary", batch=2, heads=2, size=8, merged=True, strided=True).state()
    fast = build(method, 64, (Sinks(4), Recent(16)), 0.15, 0.25, "blocked")
    expect_same(fast(state), replace(fast, backend="reference")(state))


def test_the_largest_of_ties_is_the_earliest():
    score = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert blocked.best(score, 3).tolist() == [[False, True, True, False, True], [True, True, True, False, False]]
    chunks = blocked.best_of_chunks(score, 3, [2, 2, 1])
    assert chunks.sum(-1).tolist() == [3, 3]
    assert chunks[0].tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("kind", ["ties", "duplicates", "zeros", "extreme", "equal", "runs"])
def test_similarity_reached_is_the_references(kind):
    state = StateCase(slots=64, kind=kind, batch=2, heads=2, size=8).state()
    fast = build("sequence", 16, (), 0.5, 0.5, "blocked")
    ours, theirs = fast(state), replace(fast, backend="reference")(state)
    assert ours.slots == theirs.slots
    # Whoever left joined one of the best: compare the sums of the best similarities of those that left.
    left = [~torch.isin(torch.arange(64), x.positions[0, 0]) for x in (ours, theirs)]
    pairs = Cosine()(state.keys[0, 0].view(4, 16, 8)[:, 0::2], state.keys[0, 0].view(4, 16, 8)[:, 1::2])
    best = torch.full((4, 16), 0.0).index_copy(1, torch.arange(0, 16, 2), pairs.amax(-1)).flatten()
    torch.testing.assert_close(best[left[0]].sum(), best[left[1]].sum(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.partition(Halves(64)), "Halves"),
        (lambda b: b.partition(Alternating(None)), "chunks of a fixed size"),
        (lambda b: b.similarity(Dot()), "Dot"),
        (lambda b: b.similarity(Cosine(heads="mean")), "head by head"),
        (lambda b: b.similarity(Cosine(rope="before")), "after RoPE"),
        (lambda b: b.matching(WardMatching()), "combines"),
        (lambda b: b.similarity(lambda x, y: x @ y.mT), "function"),
    ],
)
def test_stages_without_a_fast_path_are_refused_by_name_and_auto_falls_to_the_reference(change, reason):
    builder = change(Compressor.builder())
    with pytest.raises(BackendError, match=reason):
        builder.build(backend="blocked")
    assert builder.build().runs_on("cpu") == "reference"


def test_a_subclass_is_never_bypassed():
    class Opposite(Cosine):
        def __call__(self, a, b):
            return -super().__call__(a, b)

    assert Compressor.builder().similarity(Opposite()).build().runs_on("cpu") == "reference"


def test_input_is_left_as_it_was(make_state):
    state = make_state(200)
    before = [x.clone() for x in (state.keys, state.values, state.degree, state.positions)]
    build("sequence", 16, (), 0.2, 0.25)(state)
    assert all(
        x.equal(y) for x, y in zip(before, (state.keys, state.values, state.degree, state.positions), strict=True)
    )


def test_other_devices_are_refused():
    rows, slots = torch.empty(1, 1, 4, 2, device="meta"), torch.empty(1, 1, 4, device="meta")
    state = KVState(rows, rows, slots, slots.long(), seen=torch.empty(1, device="meta").long())
    with pytest.raises(BackendError, match="meta"):
        build("chunk", 4, backend="blocked")._rounds(state, state.live, (2,))
