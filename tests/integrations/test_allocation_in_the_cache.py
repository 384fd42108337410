"""Layers of one cache with budgets of their own: what each holds, and where one mask cannot serve them all."""

from __future__ import annotations

import copy

import pytest
import torch
from matrix_generate import HANDS_OVER
from torch.nn.functional import pad

from analysis.reproduce.capture import capture
from centroidkv import Budget, Compressor, KVState
from centroidkv.allocation import MiddleLayers
from centroidkv.errors import BackendError, BudgetError, CacheError
from centroidkv.integrations.transformers import CentroidCache, enable


def uneven(budget=0.3):
    """Of three layers the middle one gets three times the slots of the others: 18, 54 and 18 % for a budget of 30 %."""
    return Compressor.builder().allocation(MiddleLayers(ratio=3)).budget(budget).build()


def generate(model, ids, cache, new=30, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


@torch.no_grad()
def test_every_layer_is_compressed_to_its_own_share(llama, prompt):
    model, ids = llama(), prompt(1000)
    cache, recorded = CentroidCache(uneven()), capture(llama(), ids)
    with enable(model):
        model(ids, past_key_values=cache)
    assert [layer.growing.physical for layer in cache.layers] == [180, 540, 180]
    for layer, seen, ratio in zip(cache.layers, recorded, (0.18, 0.54, 0.18), strict=True):
        plain = Compressor.builder().budget(ratio).build()
        by_hand = plain(KVState.from_kv(seen.keys, seen.values))
        assert layer.growing.state.positions.equal(by_hand.positions.int())
        assert torch.allclose(layer.growing.state.keys, by_hand.keys, atol=1e-4)
    stats = cache.stats()
    assert (stats.logical, stats.physical, stats.merged) == (1000, 300, 700)
    assert stats.bytes == pytest.approx(0.3 * stats.bytes_full * (1 + 8 / (2 * 16 * 4)))


def test_left_padded_rows_equal_their_own_runs(llama, prompt):
    model, rows = llama(), [prompt(n) for n in (900, 437)]
    ids = torch.cat([pad(row, (900 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (900 - row.shape[1], 0)) for row in rows])
    with enable(model):
        together = generate(model, ids, CentroidCache(uneven(), interval=16), attention_mask=mask)
        for row, out in zip(rows, together, strict=True):
            alone = generate(model, row, CentroidCache(uneven(), interval=16))
            assert out[900:].equal(alone[0, row.shape[1] :])


@pytest.mark.skipif(not HANDS_OVER, reason="stock attention takes degrees from a cache only from 5.24")
def test_stock_attention_is_refused_by_name_where_its_one_mask_does_not_fit(llama, prompt):
    model, ids = llama(), prompt(600)
    cache = CentroidCache(uneven(), interval=16)
    text = generate(model, ids, cache)
    with enable(model):
        assert text.equal(generate(model, ids, CentroidCache(uneven(), interval=16)))
    assert len({layer.growing.physical for layer in cache.layers}) == 2
    with pytest.raises(BackendError, match=r"slots.*MiddleLayers.*enable\(model\)"), torch.no_grad():
        model(prompt(7), past_key_values=cache)
    for columns in (1, 500):  # padding that is out of every mask by the second step, and padding that is not
        padded = torch.cat((ids, pad(ids[:, columns:], (columns, 0))))
        mask = torch.ones_like(padded)
        mask[1, :columns] = 0
        arguments = {"attention_mask": mask, "new": 8}
        if columns == 1:
            with enable(model):
                expected = generate(model, padded, CentroidCache(uneven(), interval=16), **arguments)
            assert expected.equal(generate(model, padded, CentroidCache(uneven(), interval=16), **arguments))
        else:
            with pytest.raises(BackendError, match=r"padding.*enable\(model\)"):
                generate(model, padded, CentroidCache(uneven(), interval=16), **arguments)


def test_copies_share_the_compressors_and_a_saved_cache_goes_on(llama, prompt, tmp_path):
    model, ids = llama(), prompt(600)
    with enable(model):
        text = generate(model, ids, cache := CentroidCache(uneven(), interval=16))
        twin = copy.deepcopy(cache)
        cache.save(tmp_path / "cache")
        again = CentroidCache.load(tmp_path / "cache", uneven(), config=model.config)
        expected = generate(model, text, cache)
        assert generate(model, text, twin).equal(expected)
        assert generate(model, text, again).equal(expected)
    pairs = zip(twin.layers, cache.layers, strict=True)
    assert all(a.growing.compressor is b.growing.compressor for a, b in pairs)


def test_budgets_that_do_not_fit_are_refused_before_the_first_token(llama):
    with pytest.raises(BudgetError, match=r"cannot hold"):
        CentroidCache(uneven(Budget.tokens(100)), config=llama().config)  # 60 slots, 68 to preserve
    with pytest.raises(CacheError, match=r"equally large"):
        CentroidCache(uneven(Budget.tokens(500)), capacity="fixed")


MIXED = [Budget.ratio(0.7), Budget.tokens(300)]
"""Of a prompt of 400 tokens the middle layer keeps everything at first, while the others are compressed."""


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", MIXED, ids=repr)
@pytest.mark.parametrize("short", [300, 150])
def test_padding_stays_hidden_in_layers_that_keep_everything(llama, prompt, attention, budget, short):
    model, rows = llama(attention), [prompt(n) for n in (400, short)]
    ids = torch.cat([pad(row, (400 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (400 - row.shape[1], 0)) for row in rows])
    more = prompt(5).repeat(2, 1)
    with enable(model):
        cache = CentroidCache(uneven(budget), interval=1000)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        assert {layer.growing.events for layer in cache.layers} == {0, 1}
        found = []
        for step in (slice(0, 1), slice(1, 5)):  # one token, then several
            mask = torch.cat((mask, torch.ones_like(more[:, step])), 1)
            places = mask.sum(-1, keepdim=True) + torch.arange(step.start - step.stop, 0)
            found.append(model(more[:, step], attention_mask=mask, position_ids=places, past_key_values=cache).logits)
        for index, row in enumerate(rows):
            alone = CentroidCache(uneven(budget), interval=1000)
            model(row, past_key_values=alone)
            for step, logits in zip((slice(0, 1), slice(1, 5)), found, strict=True):
                expected = model(more[:1, step], past_key_values=alone).logits[0]
                torch.testing.assert_close(logits[index], expected, atol=2e-5, rtol=0)


@pytest.mark.skipif(not HANDS_OVER, reason="candidates are cropped before they are clustered only from 5.17 on")
@pytest.mark.parametrize("budget", MIXED, ids=repr)
def test_assisted_generation_says_what_greedy_does(llama, prompt, budget):
    model, ids = llama(), prompt(400)
    with enable(model):
        plain = generate(model, ids, CentroidCache(uneven(budget), interval=1000))
        assisted = generate(model, ids, CentroidCache(uneven(budget), interval=1000), prompt_lookup_num_tokens=3)
    assert assisted.equal(plain)


@pytest.mark.skipif(not HANDS_OVER, reason="stock attention takes degrees from a cache only from 5.24")
@torch.no_grad()
def test_a_loaded_padded_cache_is_not_silently_wrong_under_stock_attention(llama, prompt, tmp_path):
    model, ids, new = llama(), prompt(400, 2), prompt(1).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with enable(model):
        cache = CentroidCache(uneven(0.7), interval=1000)
        model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        cache.save(tmp_path / "cache")
        mask = torch.cat((mask, torch.ones_like(new)), 1)
        step = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        expected = model(new, past_key_values=cache, **step).logits
    again = CentroidCache.load(tmp_path / "cache", uneven(0.7), config=model.config)
    # The padding is out of the first layer's mask, so that there is none, but not out of the second layer's slots.
    assert again.layers[0].growing.physical < 300 < again.layers[1].growing.physical
    torch.testing.assert_close(model(new, past_key_values=again, **step).logits, expected, atol=2e-5, rtol=0)


def test_what_says_it_is_even_serves_where_layers_must_be_alike():
    def alike(depths):
        return [1.0] * len(depths)

    build = Compressor.builder().budget(Budget.tokens(200))
    CentroidCache(build.allocation(MiddleLayers(ratio=1)).build(), capacity="fixed")
    with pytest.raises(CacheError, match=r"equally large"):
        CentroidCache(build.allocation(alike).build(), capacity="fixed")
    alike.even = True
    CentroidCache(build.allocation(alike).build(), capacity="fixed")
