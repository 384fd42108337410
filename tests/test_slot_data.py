"""A datum that a stage adds: it says how it merges, and travels wherever its slots do."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from centroidkv import Budget, Compressor, KVState
from centroidkv.cache import Exact, FixedState, GrowingState, Offloaded, Quantised
from centroidkv.errors import ServingError, ShapeError, StageError
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import Constant
from centroidkv.similarity import Cosine
from centroidkv.slot_data import SlotDatum
from centroidkv.state_ops import completed, join_rows, join_slots, row, tensors_of, widened

NOTED = SlotDatum("mean", fill=-1.0, lasting=True)


@dataclass(frozen=True)
class Noting:
    """Cosine, and a score per slot that is made once, lasts, and is averaged when slots merge. This is all it takes."""

    def __call__(self, a, b):
        return Cosine()(a, b)

    def prepare(self, state, free):
        made = torch.stack((state.positions.float(), state.values[..., 0].float()), -1)
        old = state.slot_data.get("noted")
        if old is not None:  # of the tokens that came since, which were filled in
            made = torch.where(old == NOTED.fill, made, old)
        return state.with_slot_data("noted", made, NOTED)


def compressor(budget, **parts):
    builder = Compressor.builder().preserve(Sinks(1), Recent(2)).partition(Alternating(8)).schedule(Constant(0.3))
    return builder.similarity(Noting()).budget(budget).build(**parts)


def expect_means(state):
    """What is noted is the mean of what it was of the tokens in a slot: their first value's mean, and their place's."""
    live = state.live
    noted = state.slot_data["noted"]
    told = live & (noted[..., 1] != NOTED.fill)
    assert torch.allclose(noted[..., 1][told], state.values[..., 0].float()[told], atol=2e-2)
    alone = told & (state.degree == 1)
    assert noted[..., 0][alone].equal(state.positions.float()[alone])
    mass = (noted[..., 0] * state.degree)[..., :].masked_fill(~told, 0)
    assert bool((mass.sum(-1) > 0).all())


def test_rules_are_carried_out_by_hand():
    x = torch.tensor([[[[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]]]])
    state = KVState(x, x, torch.tensor([[[1.0, 3, 1, 1]]]), torch.arange(4)[None, None])
    data = torch.tensor([[[1.0, 2, 4, 8]]])
    for merge, wanted in (("keep", [2, 8]), ("sum", [3, 12]), ("mean", [1.75, 6])):
        for backend in ("reference", "auto"):
            small = Compressor.builder().preserve().partition(Alternating(4)).budget(Budget.tokens(2))
            small = small.schedule(Constant(0.5)).build(backend)
            after = small(state.with_slot_data("mine", data, SlotDatum(merge)))
            assert after.slot_data["mine"][0, 0].tolist() == wanted, (merge, backend)
            assert after.rule("mine").merge == merge


@pytest.mark.parametrize("rule", [("max",), ("sum", "0"), ("sum", float("inf")), ("sum", 0.0, "yes"), ("sum", True)])
def test_rules_that_mean_nothing_are_refused(rule):
    with pytest.raises(StageError):
        SlotDatum(*rule)


def test_a_rule_of_nothing_is_refused():
    x = torch.randn(1, 1, 3, 2)
    with pytest.raises(ShapeError, match=r"slot_rules speak of \['mine'\]"):
        replace(KVState.from_kv(x, x), slot_rules={"mine": NOTED})


def tokens(count, batch=2):
    return torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 32)


def append(layer, count, batch=2, real=None):
    layer.append(*tokens(count, batch), real)


STORAGES = [None, Exact(), Quantised(8), Offloaded(), Offloaded(Quantised(8))]


@pytest.mark.parametrize("storage", STORAGES, ids=repr)
def test_it_travels_through_the_life_of_a_layer(storage):
    layer = GrowingState(compressor(0.5), 8, storage=storage)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, :9] = False
    append(layer, 40, real=real)
    assert layer.state.rule("noted") == NOTED
    expect_means(layer.state)
    for _ in range(3):
        append(layer, 1)
    assert bool((layer.state.slot_data["noted"][:, :, -3:] == NOTED.fill).all())  # nobody told about these yet
    before = layer.state
    twin = copy.deepcopy(layer)
    packed, facts = layer.pack()
    again = GrowingState(compressor(0.5), 8, storage=storage)
    again.unpack(packed, facts, torch.device("cpu"))
    for other in (twin, again):
        same(other.state, before)
    layer.crop(2)
    same(layer.state, before.map_slots(lambda x: x[:, :, :-2], seen=before.seen - 2))
    layer.reorder(torch.tensor([1, 1, 0]))
    same(layer.state, before.map_slots(lambda x: x[[1, 1, 0], :, :-2], seen=before.seen[[1, 1, 0]] - 2))
    for _ in range(20):
        append(layer, 1, 3)
    expect_means(layer.state)
    held = layer.state
    layer.restore(held, layer.logical)  # with two rows and a storage it was lost once
    assert layer.state.slot_data["noted"][held.live].equal(held.slot_data["noted"][held.live])


def same(a, b):
    ours, theirs = tensors_of(a), tensors_of(b)
    assert ours.keys() == theirs.keys()
    live = a.live
    assert live.equal(b.live)
    for name in ours:
        assert ours[name][live].equal(theirs[name][live]), name
    assert a.seen.equal(b.seen)
    assert a.slot_rules == b.slot_rules


def test_it_travels_through_buffers_of_constant_size():
    layer = FixedState(compressor(Budget.tokens(16)), 8)
    append(layer, 40)
    expect_means(layer.state)
    for _ in range(30):
        layer.begin(1)
        layer.step(*tokens(1))
    expect_means(layer.state)
    assert layer.state.rule("noted") == NOTED


def test_a_padded_row_has_what_it_has_alone():
    keys, values = tokens(40)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[0, 5:14] = False
    both = compressor(0.5)(KVState.from_kv(keys, values, real))
    alone = compressor(0.5)(KVState.from_kv(keys[:1, :, real[0]], values[:1, :, real[0]]))
    assert both.slot_data["noted"][:1][both.live[:1]].equal(alone.slot_data["noted"][alone.live])


def test_states_are_joined_and_widened_with_all_they_carry():
    a, b = (KVState.from_kv(*tokens(n)) for n in (3, 4))
    a = a.with_slot_data("mine", torch.randn(2, 2, 3, 5), NOTED)
    longer = join_slots([a, b])
    assert longer.slot_data["mine"].shape == (2, 2, 7, 5)
    assert bool((longer.slot_data["mine"][:, :, 3:] == -1).all())
    assert join_slots([b, a]).slot_data["mine"][:, :, 4:].equal(a.slot_data["mine"])
    wide = widened(a, 4)
    assert wide.live[..., 0].any().item() is False
    assert wide.slot_data["mine"][:, :, 1:].equal(a.slot_data["mine"])
    taller = join_rows([wide, b])
    assert taller.batch == 4
    assert taller.seen.tolist() == [3, 3, 4, 4]
    assert row(taller, 1).keys.equal(wide.keys[1:2])
    assert completed(b, a).rule("mine") == NOTED
    assert completed(a, b) is a


def test_pages_that_cannot_hold_it_say_so():
    from centroidkv.integrations.vllm import ServingPlan
    from centroidkv.paged.cluster import cluster
    from centroidkv.paged.pages import Pages, slot_bytes

    plan = ServingPlan(compressor(0.5), 16, 16)
    cache = torch.randn(8, 2, 16, slot_bytes(32, 32, torch.float32, False) // 4)
    pages = Pages.of(cache, 32, 32, False)
    pages.write(torch.randn(64, 2, 32), torch.randn(64, 2, 32), torch.arange(16, 80))
    event = next(iter(plan.events(64, 0, 64)))
    with pytest.raises(ServingError, match=r"\['noted'\].*would be lost"):
        cluster([pages], list(range(1, 5)), event, plan, None)
