from dataclasses import replace

import pytest
import torch

from centroidkv import Budget, Compressor, KVState, presets
from centroidkv.errors import (
    BackendError,
    BudgetError,
    BudgetNotMetWarning,
    NonFiniteError,
    PositionOrderError,
    RotaryError,
    ShapeError,
    StageError,
)
from centroidkv.matching import BipartiteSoftMatching, Evict, ThresholdMatching
from centroidkv.partition import Alternating, Halves
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.records import Assignment
from centroidkv.schedule import Constant, LinearAnnealing
from centroidkv.similarity import Cosine

CHUNK = 8
LENGTHS = (0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


def small(budget=0.5, **parts):
    builder = Compressor.builder().preserve(Sinks(1), Recent(2)).partition(Alternating(CHUNK)).budget(budget)
    for name, part in parts.items():
        builder = getattr(builder, name)(part)
    return builder.build()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_ratio_and_dtype(make_state, length, ratio, dtype):
    state = make_state(length, dtype=dtype)
    compressor = small(ratio)
    if length > 3 and Budget.ratio(ratio).slots(length) < 4:
        with pytest.raises(BudgetError, match="at least 4"):
            compressor(state)
        return
    smaller = compressor(state) if length != 2 or ratio == 1.0 else allow_unmet(compressor, state)
    assert smaller.slots == compressor.plan(length).final
    assert smaller.keys.dtype == dtype
    assert smaller.degree.sum(-1).tolist() == [[length] * 2] * 2
    smaller.validate()


def allow_unmet(compressor, state):
    with pytest.warns(BudgetNotMetWarning):
        return compressor(state)


def test_a_quarter_right_after_prefill_takes_at_least_two_rounds(make_state):
    compressor = Compressor.builder().preserve().schedule(Constant(0.5)).budget(0.25).build()
    smaller = compressor(make_state(400))
    assert (smaller.slots, smaller.rounds) == (100, 2)


def test_within_budget_is_the_identity(make_state):
    state = make_state(40)
    assert small(1.0)(state) is state
    assert small(Budget.tokens(40))(state) is state


def test_rate_zero_is_the_identity_and_says_so(make_state):
    state = make_state(40)
    same = allow_unmet(small(0.5, schedule=Constant(0.0)), state)
    assert torch.equal(same.keys, state.keys)
    assert torch.equal(same.degree, state.degree)
    assert same.rounds == 0


def test_preserved_slots_are_bit_identical(make_state):
    state = make_state(60, dtype=torch.bfloat16)
    smaller = small(0.5)(state)
    for part in ("keys", "values", "degree", "positions"):
        before, after = getattr(state, part), getattr(smaller, part)
        assert torch.equal(after[:, :, :1], before[:, :, :1])
        assert torch.equal(after[:, :, -2:], before[:, :, -2:])


def test_the_input_is_left_untouched(make_state):
    state = make_state(60)
    before = state.map_slots(torch.clone)
    small(0.25)(state)
    for part in ("keys", "values", "degree", "positions"):
        assert torch.equal(getattr(state, part), getattr(before, part))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("preset", sorted(presets.ALL))
def test_a_padded_row_equals_its_own_run(preset, side):
    from centroidkv import Rotary

    compressor = presets.ALL[preset](0.5)
    rotary = Rotary.from_theta(1e4, 16)
    rows = [torch.randn(1, 2, n, 16) for n in (300, 333, 211)]
    pad = [torch.full((1, 2, 333 - row.shape[2], 16), float("nan")) for row in rows]
    batch = torch.cat([torch.cat((p, r) if side == "left" else (r, p), 2) for p, r in zip(pad, rows, strict=True)])
    mask = ~batch[:, 0, :, 0].isnan()
    queries = torch.randn(3, 2, 12, 16)
    together = compressor(replace(KVState.from_kv(batch, batch, mask, rotary=rotary), head_data={"queries": queries}))
    for index, row in enumerate(rows):
        asked = {"queries": queries[index : index + 1]}
        alone = compressor(replace(KVState.from_kv(row, row, rotary=rotary), head_data=asked))
        for part in ("keys", "values", "degree", "positions"):
            mine = getattr(together, part)[index : index + 1]
            assert torch.equal(mine[:, :, together.slots - alone.slots :], getattr(alone, part))
        assert not together.degree[index, :, : together.slots - alone.slots].any()


def test_compressing_twice_is_calling_twice(make_state):
    state = make_state(200)
    once = small(0.5)(state)
    twice = small(0.25)(once)
    assert twice.slots == 50
    assert twice.degree.sum(-1).tolist() == [[200.0, 200.0]] * 2
    assert twice.rounds > once.rounds


def test_plan_is_what_happens(make_state):
    for tokens in (10, 100, 257, 1000):
        compressor = small(0.5)
        plan = compressor.plan(tokens)
        smaller = compressor(make_state(tokens))
        assert (smaller.slots, smaller.rounds) == (plan.final, len(plan.sizes))


def test_threshold_may_leave_heads_of_different_length_and_warns(make_state):
    state = make_state(64)
    state.keys[:, 0] = state.keys[:, 0, :1]  # head 0: all keys equal, everything may merge
    with pytest.warns(BudgetNotMetWarning, match="fewer"):
        smaller = small(0.25, matching=ThresholdMatching(0.99), similarity=Cosine())(state)
    live = smaller.live.sum(-1)
    assert live[0].tolist() == [16, 64]
    assert smaller.degree.sum(-1).tolist() == [[64.0, 64.0]] * 2
    smaller.validate()
    # An uneven state can be compressed further.
    assert small(0.25)(smaller).live.sum(-1).tolist() == [[16, 16]] * 2


def test_eviction_gives_mass_up_but_remembers_what_was_seen(make_state):
    state = make_state(100)
    smaller = presets.streaming_llm(Budget.tokens(20))(state)
    assert smaller.degree.sum(-1).tolist() == [[20.0, 20.0]] * 2
    assert smaller.seen.tolist() == [100, 100]
    assert smaller.positions[0, 0].tolist() == [0, 1, 2, 3, *range(84, 100)]


def test_small_user_stages_work_without_registration(make_state):
    class FirstPairs:
        def __call__(self, keys, degree, partition, similarity, edges):
            joins = torch.arange(keys.shape[2]).repeat(*keys.shape[:2], 1)
            joins[:, :, partition.sources[:edges]] = partition.targets[:edges]
            return Assignment(joins)

    compressor = (
        Compressor.builder()
        .preserve(lambda state: state.positions < 3)
        .partition(lambda length: (range(0, length - 1, 2), range(1, length, 2)))
        .similarity(lambda a, b: a @ b.mT)
        .matching(FirstPairs())
        .schedule(lambda index: 0.3)
        .budget(0.5)
        .build()
    )
    state = make_state(50)
    smaller = compressor(state)
    assert smaller.slots == 25
    assert torch.equal(smaller.keys[:, :, :3], state.keys[:, :, :3])
    assert smaller.degree.sum(-1).tolist() == [[50.0, 50.0]] * 2
    with pytest.raises(StageError, match="planned ahead"):
        compressor.plan(50)


def test_builder_methods_do_not_change_the_builder():
    base = Compressor.builder()
    base.budget(0.5).partition(Alternating(32))
    assert base.build().budget == Budget.ratio(0.25)


def test_repr_shows_every_stage():
    text = repr(presets.distinctive(Budget.tokens(512)))
    for word in (
        "Sinks(slots=4)",
        "Distinctive",
        "Alternating(chunk_size=256)",
        "Cosine",
        "BipartiteSoftMatching",
        "DegreeWeightedMean",
        "LinearAnnealing",
        "Budget.tokens(512)",
        "auto (blocked on the CPU)",
    ):
        assert word in text


BAD_BUILDS = {
    "class instead of instance": (lambda b: b.partition(Alternating), StageError, r"Alternating\(\)"),
    "not callable": (lambda b: b.matching(3), StageError, "matching"),
    "preserver": (lambda b: b.preserve(4), StageError, "Sinks"),
    "fixed counts over the budget": (lambda b: b.budget(Budget.tokens(68)), BudgetError, r"Budget.tokens\(69\)"),
    "shares over one": (lambda b: b.preserve(Distinctive(share=0.7), Recent(share=0.5)), BudgetError, "1.2"),
    "shares leave no centroid": (lambda b: b.preserve(Distinctive(share=1.0)), BudgetError, "no slot"),
    "budget type": (lambda b: b.budget("quarter"), BudgetError, "number"),
    "rate over a half": (lambda b: b.schedule(LinearAnnealing(0.6)), StageError, "half"),
}


@pytest.mark.parametrize("name", BAD_BUILDS)
def test_build_refuses_with_an_error_that_teaches(name):
    change, error, message = BAD_BUILDS[name]
    with pytest.raises(error, match=message):
        change(Compressor.builder()).build()


@pytest.mark.parametrize("backend", ["cuda", "Triton", None])
def test_unknown_backend_is_refused(backend):
    with pytest.raises(BackendError, match="auto"):
        Compressor.builder().build(backend=backend)


def test_auto_says_what_it_chose():
    assert Compressor.builder().build(backend="auto").runs_on("cpu") == "blocked"
    assert Compressor.builder().build(backend="reference").runs_on("cpu") == "reference"
    assert Compressor.builder().partition(Halves()).build().runs_on("cpu") == "reference"


def test_a_budget_below_what_is_preserved_is_refused_for_the_row(make_state):
    compressor = Compressor.builder().budget(0.25).build()
    with pytest.raises(BudgetError, match=r"budget of 50 slots .* 68 preserved .* at least 69"):
        compressor(make_state(200))
    same = compressor(make_state(200), strict=False)
    assert same.slots == 200


def test_bad_states_are_refused(make_state):
    compressor = small(0.5)
    with pytest.raises(ShapeError, match="KVState"):
        compressor(torch.randn(1, 2, 3, 4))
    bad = make_state(50)
    bad.values[0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteError):
        compressor(bad)
    state = make_state(50)
    with pytest.raises(PositionOrderError):
        compressor(replace(state, positions=state.positions.flip(-1)))


def test_keys_before_rope_need_the_rotation(make_state):
    state = replace(make_state(100), rotary=None)
    for compressor in (small(0.5, similarity=Cosine(rope="before")), presets.distinctive(Budget.tokens(80))):
        assert compressor.needs_rotary
        with pytest.raises(RotaryError, match="Rotary"):
            compressor(state)


def test_keys_before_rope_merge_equal_content_far_apart():
    from centroidkv import Rotary

    rotary = Rotary.from_theta(10.0, 8)
    content = torch.randn(1, 1, 2, 8).repeat(1, 1, 20, 1)  # two contents, alternating
    positions = torch.arange(40).view(1, 1, 40)
    state = KVState.from_kv(rotary.rotate(content, positions), content, rotary=rotary)
    halves = lambda length: (range(length // 2), range(length // 2, length))  # noqa: E731
    compressor = small(0.5, similarity=Cosine(rope="before"), partition=halves, schedule=Constant(0.5))
    smaller = compressor(state)
    inside = smaller.values[0, 0, 1:-2]
    nearest = torch.cdist(inside, content[0, 0, :2]).amin(-1)
    assert nearest.max() < 1e-5  # no cluster mixes the two contents


def test_wrong_matchers_are_caught_in_the_act(make_state):
    class OffByOne(BipartiteSoftMatching):
        def __call__(self, keys, degree, partition, similarity, edges):
            return super().__call__(keys, degree, partition, similarity, edges - 1)

    with pytest.raises(StageError, match="exactly"):
        small(0.5, matching=OffByOne())(make_state(50))
    with pytest.raises(StageError, match="Assignment"):
        small(0.5, matching=lambda *parts: None)(make_state(50))


def test_uneven_masks_are_refused(make_state):
    compressor = small(0.5)
    uneven = Compressor.builder().preserve(lambda s: s.keys[..., 0] > 0).budget(0.9).build()
    with pytest.raises(StageError, match="every row and head"):
        uneven(make_state(50))
    assert compressor(make_state(50)).slots == 25


def test_shared_heads_decide_together(make_state):
    smaller = presets.tome(0.5)(make_state(64, heads=3))
    assert torch.equal(smaller.positions[:, 0], smaller.positions[:, 2])
    apart = small(0.5)(make_state(64, heads=3))
    assert not torch.equal(apart.positions[:, 0], apart.positions[:, 2])


def test_evict_needs_no_room_for_centroids():
    compressor = Compressor.builder().preserve(Sinks(4), Recent(60)).matching(Evict()).budget(Budget.tokens(64)).build()
    keys = torch.randn(1, 1, 100, 4)
    assert compressor(KVState.from_kv(keys, keys)).slots == 64
