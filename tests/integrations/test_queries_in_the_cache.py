"""Compressors that weigh slots by the model's queries, inside CentroidCache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from analysis.reproduce.capture import capture
from centroidkv import Compressor, KVState
from centroidkv.errors import BackendError
from centroidkv.integrations.rope import rotary_of
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.caller import find_queries
from centroidkv.matching import WardMatching
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.queries import QUERIES, sample_queries
from centroidkv.similarity import ExpectedLogits


def balanced(budget):
    """The preset's parts, with few enough preserved slots for short prompts."""
    return (
        Compressor.builder()
        .preserve(Sinks(2), Recent(4), Distinctive("passages", share=0.5))
        .similarity(ExpectedLogits())
        .matching(WardMatching())
        .budget(budget)
        .build()
    )


def generate(model, ids, cache, new=40, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer_is_compressed_by_its_own_queries(llama, prompt, attention):
    model, ids = llama(attention), prompt(120)
    recorded = capture(llama("sdpa"), ids)
    cache, rotary = CentroidCache(balanced(0.5)), rotary_of(model.config)
    with enable(model):
        model(ids, past_key_values=cache)
    for layer, seen in zip(cache.layers, recorded, strict=True):
        places = torch.arange(120).expand(seen.query.shape[:3])
        sample = sample_queries(rotary.unrotate(seen.query * seen.scale, places), seen.keys.shape[1])
        state = replace(KVState.from_kv(seen.keys, seen.values, rotary=rotary), head_data={QUERIES: sample})
        by_hand = balanced(0.5)(state)
        assert layer.growing.state.positions.equal(by_hand.positions.int())
        assert torch.allclose(layer.growing.state.keys, by_hand.keys, atol=1e-4)


def test_left_padded_rows_equal_their_own_runs(llama, prompt):
    model = llama()
    rows = [prompt(n) for n in (300, 37, 211)]
    ids = torch.cat([pad(row, (300 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (300 - row.shape[1], 0)) for row in rows])
    with enable(model):
        together = generate(model, ids, CentroidCache(balanced(0.3), interval=16), attention_mask=mask)
        for index, row in enumerate(rows):
            alone = generate(model, row, CentroidCache(balanced(0.3), interval=16))
            assert torch.equal(together[index : index + 1, -40:], alone[:, -40:])


def test_beams_and_second_turns_carry_the_queries_along(llama, prompt, follow):
    model, ids = llama(), prompt(120)
    with enable(model):
        # What is clustered after the rows moved is chosen by the queries that each of them asked before.
        moved = follow(model, lambda: CentroidCache(balanced(0.5), interval=16), prompt(120, 3))
        assert moved.stats().events > 1
        cache = CentroidCache(balanced(0.5), interval=32)
        first = generate(model, ids, cache)
        longer = torch.cat((first, prompt(20)), -1)
        second = generate(model, longer, cache)
    assert cache.stats().logical == second.shape[1] - 1
    assert cache.stats().events > 2


def test_a_call_without_a_visible_attention_module_is_refused():
    with pytest.raises(BackendError, match=r"layer 3.*presets\.distinctive"):
        find_queries(3)
