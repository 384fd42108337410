"""Quantised and offloaded state inside generate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import pad

from centroidkv import Compressor
from centroidkv.cache import Exact, Offloaded, Quantised
from centroidkv.errors import CacheError, StageError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.preserve import Recent, Sinks

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

QUANTISED = [Quantised(8), Quantised(4), Offloaded(Quantised(8))]


def compressor(budget=0.25):
    return Compressor.builder().preserve(Sinks(4), Recent(16)).budget(budget).build()


def generate(model, ids, cache, new=60, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("storage", [Exact(), Offloaded()], ids=repr)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_offloading_changes_no_token(llama, prompt, storage, attention):
    model, ids = llama(attention), prompt(300)
    with enable(model):
        plain = generate(model, ids, one := CentroidCache(compressor(), 16))
        stored = generate(model, ids, two := CentroidCache(compressor(), 16, storage=storage))
    assert stored.equal(plain)
    assert one.stats().physical == two.stats().physical
    for a, b in zip(one.layers, two.layers, strict=True):
        assert a.keys.equal(b.keys)


def test_offloaded_padded_batches_and_beams(llama, prompt):
    model = llama()
    rows = [prompt(n) for n in (300, 37, 211)]
    ids = torch.cat([pad(row, (300 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (300 - row.shape[1], 0)) for row in rows])
    with enable(model):
        for options in ({}, {"num_beams": 3}):
            plain = generate(model, ids, CentroidCache(compressor(0.3), 16), attention_mask=mask, **options)
            stored = CentroidCache(compressor(0.3), 16, storage=Offloaded())
            assert generate(model, ids, stored, attention_mask=mask, **options).equal(plain)


@torch.no_grad()
@pytest.mark.parametrize(("storage", "error"), [(Quantised(8), 0.05), (Quantised(4), 1.0)], ids=repr)
def test_quantised_logits_are_near_those_of_full_precision(llama, prompt, storage, error):
    model, ids = llama(), prompt(300)
    with enable(model):
        model(ids, past_key_values=(plain := CentroidCache(compressor(), 16)))
        logits = model(ids, past_key_values=(small := CentroidCache(compressor(), 16, storage=storage))).logits
        assert logits.equal(model(ids).logits)  # the prompt itself is read in full precision
        one, two = (model(ids[:, :10], past_key_values=cache).logits for cache in (plain, small))
    assert 0 < (one - two).abs().max() < error
    assert small.stats().bytes < 0.6 * plain.stats().bytes
    assert small.stats().bytes == sum(layer.growing.nbytes for layer in small.layers)
    assert small.stats().bytes_full == plain.stats().bytes_full


@torch.no_grad()
@pytest.mark.parametrize("storage", QUANTISED, ids=repr)
def test_quantised_padded_rows_fare_as_they_would_alone(llama, prompt, storage):
    """Equal logits but for single codes that flip where attention over padding differs in the last bits.

    The same keys are stored alike to the bit: tests/cache/test_storage.py.
    """
    model, forced = llama(), prompt(40)
    rows = [prompt(n) for n in (300, 37, 211)]
    ids = torch.cat([pad(row, (300 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (300 - row.shape[1], 0)) for row in rows])
    together, *alone = (CentroidCache(compressor(0.3), 16, storage=storage) for _ in range(4))
    with enable(model):
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=places, past_key_values=together)
        for row, cache in zip(rows, alone, strict=True):
            model(row, past_key_values=cache)
        for token in forced.split(1, 1):
            mask = pad(mask, (0, 1), value=1)
            both = model(
                token.expand(3, 1), attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1,
                past_key_values=together,
            ).logits  # fmt: skip
            for index, cache in enumerate(alone):
                one = model(token, past_key_values=cache).logits
                assert torch.allclose(both[index : index + 1], one, atol=0.03)
    state = together.layers[0].growing.state
    for index, cache in enumerate(alone):
        own = cache.layers[0].growing.state
        assert state.positions[index][state.live[index]].equal(own.positions[0][own.live[0]])


@torch.no_grad()
@pytest.mark.parametrize("storage", QUANTISED, ids=repr)
def test_copies_reset_and_crop(llama, prompt, storage):
    model, ids = llama(), prompt(200)
    with enable(model):
        model(ids, past_key_values=(cache := CentroidCache(compressor(), 64, storage=storage)))
        expected = model(ids[:, :1], past_key_values=cache).logits
        cache.crop(-1)
        twin = copy.deepcopy(cache)
        model(ids[:, :30], past_key_values=cache)
        cache.crop(-30)
        assert model(ids[:, :1], past_key_values=cache).logits.equal(expected)
        assert model(ids[:, :1], past_key_values=twin).logits.equal(expected)
        with pytest.raises(CacheError, match="cannot be separated"):
            cache.crop(-5)
        cache.reset()
        assert cache.stats().bytes == 0
        again = generate(model, ids, cache, new=20)
        assert again.equal(generate(model, ids, CentroidCache(compressor(), 64, storage=storage), new=20))


def test_quantised_beams(llama, prompt):
    model, ids = llama(), prompt(120)
    with enable(model):
        beams = generate(model, ids, cache := CentroidCache(compressor(0.5), 16, storage=Quantised(8)), num_beams=3)
    assert beams.shape == (1, 180)
    assert cache.stats().logical == 179


def test_the_next_layer_is_fetched_while_one_attends(llama, prompt):
    order = []

    class Watched(Offloaded):
        def put(self, state):
            held = super().put(state)
            order.append(("put", id(held)))
            return held

        def fetch(self, held, device):
            order.append(("fetch", id(held)))
            return held

        def get(self, held, device):
            order.append(("get", id(held)))
            return self.inside.get(held, device)

    model, ids = llama(), prompt(200)
    with enable(model), torch.no_grad():
        model(ids, past_key_values=(cache := CentroidCache(compressor(), 64, storage=Watched())))
        layers = [number for what, number in order if what == "put"]
        assert len(layers) == 3
        order.clear()
        model(ids[:, :1], past_key_values=cache)
    first, second, third = layers
    expected = [("get", first), ("fetch", second), ("get", second), ("fetch", third), ("get", third), ("fetch", first)]
    assert order == expected


def test_something_else_as_storage_is_refused(llama):
    with pytest.raises(StageError, match="storage"):
        CentroidCache(compressor(), storage="int8")
    cache = CentroidCache(compressor(), config=llama().config)
    with pytest.raises(NotImplementedError, match="Offloaded"):
        cache.layers[0].offload()
