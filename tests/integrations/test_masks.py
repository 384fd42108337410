"""What masks mean: padding is what no query sees, old slots obey a mask or it is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from matrix_models import RELEASE, needs_shared
from transformers import DynamicCache

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import CacheError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.masks import HIDDEN, before_new, real_columns
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import Constant
from tests.integrations.repeated import repeated

LOWEST = torch.finfo(torch.float32).min


def compressor(budget=0.4):
    parts = Compressor.builder().preserve(Sinks(2), Recent(8)).partition(Alternating(32)).schedule(Constant(0.3))
    return parts.budget(budget).build()


def documents(*lengths):
    """A causal mask in which no document sees another: ``[1, 1, n, n]`` bool."""
    blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
    return torch.block_diag(*blocks).bool()[None, None]


def additive(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, LOWEST)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda m: m, additive, lambda m: additive(m).bfloat16(), lambda m: m.float().log()])
def test_documents_that_later_ones_do_not_see_are_no_padding(form):
    assert real_columns(form(documents(5, 7, 3)), 1, 15) is None


@pytest.mark.parametrize("softness", [-0.001, 0.5, -30.0, -999.0])
def test_a_weighed_column_is_no_padding(softness):
    mask = additive(documents(20))
    mask[..., 3:9] += softness
    assert real_columns(mask, 1, 20) is None


@pytest.mark.parametrize("lowest", [float("-inf"), LOWEST, -1e4, HIDDEN])
@pytest.mark.parametrize("heads", [1, 3])
def test_padding_is_hidden_from_every_query_its_own_included(lowest, heads):
    real = torch.tensor([[False, False, True, True, False, True], [True] * 6])
    mask = torch.where(documents(6) & real[:, None, None], 0.0, lowest).expand(2, heads, 6, 6)
    assert real_columns(mask, 2, 6).equal(real)
    # As users do to keep softmax finite: a hidden query sees one real token; that makes no token of it.
    mask = mask.clone()
    mask[0, :, 0, 2] = 0.0
    assert real_columns(mask, 2, 6).equal(real)


def test_one_head_that_sees_a_column_makes_it_real():
    mask = documents(4).expand(1, 2, 4, 4) & torch.tensor([False, True, True, True])
    mask = mask.clone()
    mask[0, 1, 3, 0] = True
    assert real_columns(mask, 1, 4) is None


def test_a_mask_of_one_row_of_queries_speaks_for_all():
    mask = torch.tensor([[False, True, True], [True, True, True]])[:, None, None]
    assert real_columns(mask, 2, 3).tolist() == [[False, True, True], [True, True, True]]


def test_many_hidden_columns_are_read_in_parts():
    real = torch.arange(2600) >= 2300
    mask = (torch.ones(2600, 2600, dtype=torch.bool).tril() & real)[None, None]
    assert real_columns(mask, 1, 2600).equal(real[None])


def test_old_columns_are_explained_by_padding_alone():
    padding = torch.tensor([[True, False, False]])
    mask = torch.cat((~padding[:, None, None].expand(1, 1, 2, 3), torch.ones(1, 1, 2, 2, dtype=torch.bool).tril()), -1)
    assert before_new(mask, padding, None, 2) is None
    assert before_new(mask, None, None, 2) is not None
    assert before_new(additive(mask), padding, None, 2) is None
    soft = additive(mask)
    soft[..., 1] -= 0.25
    assert before_new(soft, padding, None, 2).shape[-1] == 3
    hides_more = mask.clone()
    hides_more[..., 0, 2] = False
    assert before_new(hides_more, padding, None, 2) is not None
    # ... unless it is the row of a query that is padding itself
    assert before_new(hides_more, padding, torch.tensor([[False, True]]), 2) is None


# -- models ------------------------------------------------------------------------------------------------------------

ROUTES = [True, pytest.param(False, marks=needs_shared)]


def used(model, use):
    return enable(model) if use else nullcontext()


@pytest.mark.parametrize("use", ROUTES)
@pytest.mark.parametrize("preset", [compressor(), presets.streaming_llm(0.8)])
def test_a_document_behind_a_block_diagonal_mask_still_counts(llama, prompt, use, preset):
    model, last, question = llama(), prompt(50), prompt(6)
    answers = []
    for seed in (1, 2):
        first = torch.randint(3, 101, (1, 40), generator=torch.Generator().manual_seed(seed))
        cache = CentroidCache(preset, interval=1000)
        with torch.no_grad(), used(model, use):
            both = torch.cat((first, last), 1)
            model(both, attention_mask=documents(40, 50), position_ids=torch.arange(90)[None], past_key_values=cache)
            answers.append(model(question, past_key_values=cache, position_ids=torch.arange(90, 96)[None]).logits)
        assert cache.stats().logical == 96
    assert (answers[0] - answers[1]).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_with_a_column_per_slot_is_obeyed(llama, prompt, attention):
    model, new = llama(attention), prompt(3)
    cache = CentroidCache(compressor(), interval=1000)
    with torch.no_grad(), enable(model):
        model(prompt(90), past_key_values=cache)
        slots = cache.layers[0].growing.physical
        weigh = torch.linspace(-2, 1, slots)
        plain = repeated(cache, model.config, weigh)
        mask = torch.cat((weigh.expand(3, -1), additive(documents(3))[0, 0]), -1)[None, None]
        where = torch.arange(90, 93)[None]
        got = model(new, past_key_values=cache, attention_mask=mask, position_ids=where).logits
    with torch.no_grad():
        wanted = plain(model, new, additive(documents(3)), where)
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("use", ROUTES)
def test_a_mask_that_hides_clustered_tokens_is_refused_and_nothing_is_lost(llama, prompt, use):
    model, cache = llama(), CentroidCache(compressor(), interval=1000)
    where = torch.arange(90, 93)[None]
    with torch.no_grad(), used(model, use):
        model(prompt(90), past_key_values=cache)
        before = cache.layers[0].growing.state
        hides = torch.cat((torch.arange(90) >= 40, torch.ones(3, dtype=torch.bool))).expand(1, 1, 3, 93)
        with pytest.raises(CacheError, match="column per slot"):
            model(prompt(3), past_key_values=cache, attention_mask=hides, position_ids=where)
        assert cache.layers[0].growing.state is before
        assert cache.get_seq_length() == 90
        with pytest.raises(CacheError, match="mask"):  # a 2-D mask that hides what was shown before
            model(prompt(3), past_key_values=cache, attention_mask=hides[:, 0, 0].long())
        assert model(prompt(3), past_key_values=cache).logits.isfinite().all()


@needs_shared
def test_stock_attention_refuses_a_mask_with_a_column_per_token_by_name(llama, prompt):
    model, cache = llama(), CentroidCache(compressor(), interval=1000)
    with torch.no_grad():
        model(prompt(90), past_key_values=cache)
        mask = torch.zeros(1, 1, 4, 94)
        with pytest.raises(CacheError, match="enable"):
            model(prompt(4), past_key_values=cache, attention_mask=mask, position_ids=torch.arange(90, 94)[None])
        assert cache.get_seq_length() == 90


@pytest.mark.skipif(RELEASE < (5,), reason="models do not listen to is_causal")
@pytest.mark.parametrize("use", ROUTES)
def test_tokens_that_see_one_another_both_ways(llama, prompt, use):
    model, block = llama(), prompt(4)
    cache = CentroidCache(compressor(), interval=1000)
    with torch.no_grad(), used(model, use):
        model(prompt(90), past_key_values=cache)
        plain = repeated(cache, model.config)
        got = model(block, past_key_values=cache, is_causal=False).logits
    with torch.no_grad():
        wanted = plain(model, block, torch.zeros(1, 1, 4, 4), torch.arange(90, 94)[None])
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("make", [compressor, lambda: presets.balanced(0.4)])
def test_rows_padded_inside_are_clustered_at_the_moments_of_their_own_runs(llama, prompt, make):
    model, start = llama(), prompt(120)
    ends = [prompt(n)[0] for n in (5, 9, 14)]
    wide = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    with enable(model):
        alone = []
        for end in ends:
            cache = CentroidCache(make(), interval=32)
            with torch.no_grad():
                model(start, past_key_values=cache)
            ids = torch.cat((start[0], end))[None]
            out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **wide)
            alone.append(out[0, 120 + len(end) :].tolist())
        cache = CentroidCache(make(), interval=32)
        with torch.no_grad():
            model(start, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        ids = torch.stack([torch.cat((start[0], torch.zeros(14 - len(end), dtype=torch.long), end)) for end in ends])
        mask = torch.stack(
            [torch.cat((torch.ones(120), torch.zeros(14 - len(end)), torch.ones(len(end)))).long() for end in ends]
        )
        together = model.generate(ids, attention_mask=mask, past_key_values=cache, **wide)[:, 134:].tolist()
    assert together == alone


@needs_shared
def test_a_fixed_cache_packs_padding_away_and_still_attends_to_the_right_columns(llama, prompt):
    model, ids = llama(), prompt(12, batch=2)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 5:8] = 0
    place = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = DynamicCache(config=model.config)
        with enable(model):
            ours = CentroidCache(compressor(Budget.tokens(60)), interval=8, capacity="fixed")
            for cache in (plain, ours):
                model(ids, attention_mask=mask, position_ids=place, past_key_values=cache)
            longer = torch.cat((mask, torch.ones(2, 3, dtype=torch.long)), 1)
            new, where = prompt(3, batch=2), place[:, -1:] + torch.arange(1, 4)
            got, wanted = (
                model(new, attention_mask=longer, position_ids=where, past_key_values=cache).logits
                for cache in (ours, plain)
            )
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use", ROUTES)
def test_a_row_that_was_moved_because_its_neighbour_was_clustered_goes_on_as_alone(llama, prompt, use):
    """Nothing of the row was merged, but its slots are no longer the columns that a mask or a crop would count."""
    model, ids, new = llama(), torch.cat((prompt(40), prompt(40).flip(1))), prompt(3)
    real = torch.ones(2, 40, dtype=torch.long)
    real[0, 34:] = 0
    cache, alone = CentroidCache(compressor(Budget.tokens(36)), interval=1000), DynamicCache(config=model.config)
    with torch.no_grad(), used(model, use):
        where = (real.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=real, position_ids=where, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([0]))
        assert cache.stats().events == 0
        with pytest.raises(CacheError, match="only the last 0"):
            cache.crop(-1)  # the last column is padding, the last slot a token
        mask, where = torch.cat((real[:1], torch.ones(1, 3, dtype=torch.long)), 1), torch.arange(34, 37)[None]
        step = {"attention_mask": mask, "position_ids": where, "past_key_values": cache}
        if not use:
            with pytest.raises(CacheError, match="padding between real tokens"):
                model(new, **step)
            return
        out = model(new, **step).logits
        model(ids[:1, :34], past_key_values=alone)
        assert torch.allclose(out, model(new, past_key_values=alone).logits, atol=1e-5)


def test_a_bool_mask_means_the_same_to_eager_attention_before_anything_was_clustered(llama, prompt):
    """By itself it would be added to the logits as zeros and ones."""
    model, ids = llama("eager"), prompt(40)
    where = torch.arange(40)[None]
    with torch.no_grad():
        right = model(ids, attention_mask=additive(documents(25, 15)), position_ids=where).logits
        with enable(model):
            cache = CentroidCache(compressor(), interval=1000)
            found = model(ids, attention_mask=documents(25, 15), position_ids=where, past_key_values=cache).logits
    assert torch.allclose(found, right, atol=1e-5)
