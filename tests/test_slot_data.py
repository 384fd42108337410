"""A datum that a stage adds: it says how it merges, and travels wherever its slots do."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import transformers

from centroidkv import Budget, Compressor, KVState
from centroidkv.cache import Exact, FixedState, GrowingState, Offloaded, Quantised
from centroidkv.errors import ServingError, ShapeError, StageError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.paged import PageDatum, Pages, ServingPlan, cluster, lasting_data, slot_bytes
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


BLOCK = 16


def pages_of(plan, prompt, data):
    """The pages of one request in blocks 1 to 4, and what was written into them."""
    keys, values = (torch.randn(prompt, 2, 32) for _ in "kv")
    cache = torch.full((6, 2, BLOCK, slot_bytes(32, 32, torch.float32, False, data) // 4), float("nan"))
    pages = Pages.of(cache, 32, 32, False, data)
    pages.write(keys, values, torch.arange(BLOCK, BLOCK + prompt))
    return pages, KVState.from_kv(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])


def test_it_travels_in_pages():
    plan = ServingPlan(compressor(0.5), BLOCK, BLOCK)
    data = lasting_data(plan.compressor, 32, 32, torch.float32)
    assert data == (PageDatum("noted", (2,), torch.float32, NOTED),)
    pages, state = pages_of(plan, 64, data)
    table = [1, 2, 3, 4, 5]
    cluster([pages], table, next(plan.events(64, 0, 64)), plan, None)
    small = plan.sized(32)(state)
    at = torch.tensor([3, 4])
    assert pages.read(at)[0].equal(small.keys[0])
    assert pages.read_data("noted", at).equal(small.slot_data["noted"][0])
    # A block of tokens later: what was noted of old slots is still known, and made anew of new ones.
    keys, values = torch.randn(BLOCK, 2, 32), torch.randn(BLOCK, 2, 32)
    pages.write(keys, values, torch.arange(5 * BLOCK, 6 * BLOCK))
    new = KVState.from_kv(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    # Pages without positions number old slots by the places they lie in.
    small = replace(small, positions=torch.arange(32, 64).expand(1, 2, -1).contiguous())
    longer = join_slots([small, replace(new, positions=new.positions + 64)])
    event = next(plan.events(64, 64, 80))
    cluster([pages], table, event, plan, None)
    after = plan.sized(event.target_blocks * BLOCK)(longer)
    left = torch.tensor(table[event.after.first : event.after.end])
    assert pages.read_data("noted", left).equal(after.slot_data["noted"][0])
    assert bool((after.slot_data["noted"] != NOTED.fill).all())


def test_pages_that_cannot_hold_it_say_so():
    plan = ServingPlan(compressor(0.5), BLOCK, BLOCK)
    pages, _ = pages_of(plan, 64, ())
    with pytest.raises(ServingError, match=r"no room for \['noted'\].*would lose"):
        cluster([pages], [1, 2, 3, 4], next(plan.events(64, 0, 64)), plan, None)


def test_pages_for_data_that_no_stage_brings_say_so_and_no_layer_is_written():
    data = lasting_data(compressor(0.5), 32, 32, torch.float32)
    plain = Compressor.builder().preserve(Sinks(1)).budget(0.5).build()
    plan = ServingPlan(plain, BLOCK, BLOCK)
    layers = [pages_of(plan, 64, ())[0], pages_of(plan, 64, data)[0]]
    before = layers[0].keys.clone()
    with pytest.raises(ServingError, match=r"nothing to hold for \['noted'\]"):
        cluster(layers, [1, 2, 3, 4], next(plan.events(64, 0, 64)), plan, None)
    assert layers[0].keys[1:5].equal(before[1:5])
    with pytest.raises(ServingError, match=r"nothing to hold for \['noted'\]"):
        layers[1].fill(torch.tensor([1, 2, 3, 4]), pages_of(plan, 64, ())[1], 0)


def test_pages_hold_words_of_four_bytes():
    @dataclass(frozen=True)
    class Half(Noting):
        def prepare(self, state, free):
            return state.with_slot_data("half", state.keys[..., 0].half(), NOTED)

    with pytest.raises(ServingError, match=r"and .half. is torch\.float16"):
        lasting_data(compressor(0.5).with_(similarity=Half()), 32, 32, torch.float32)


def test_it_travels_through_a_saved_file(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    cache = CentroidCache(compressor(0.5), interval=8)
    with torch.no_grad(), enable(model):
        model(torch.randint(3, 60, (1, 50)), past_key_values=cache)
    cache.save(tmp_path / "saved")
    again = CentroidCache.load(tmp_path / "saved", compressor(0.5), config=config)
    for ours, theirs in zip(cache.layers, again.layers, strict=True):
        assert "noted" in ours.growing.state.slot_data
        same(theirs.growing.state, ours.growing.state)
