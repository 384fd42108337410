"""What the cache hands over arrives, in every layer, or the model is refused before a token could be wrong."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from matrix_models import RELEASE, needs_shared
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import BackendError, BudgetNotMetWarning, CacheError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.flow import REGROUPS, attends_by_interface, why_not_straight
from centroidkv.integrations.transformers.release import STOCK_TAKES_BIAS
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.schedule import Constant
from centroidkv.similarity import Cosine

SMALL = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROUTES = [True, pytest.param(False, marks=needs_shared)]


def compressor(heads="each", budget=0.4):
    parts = (
        Compressor.builder().preserve(Sinks(2), Recent(8)).partition(Alternating(None)).similarity(Cosine(heads=heads))
    )
    return parts.schedule(Constant(0.3)).budget(budget).build()


def make(name, kind=AutoModelForCausalLM, attention="sdpa", **fields):
    torch.manual_seed(0)
    try:
        common = {} if kind is AutoModelForSeq2SeqLM else SMALL
        config = AutoConfig.for_model(name, **{**common, **fields})
        return kind.from_config(config, attn_implementation=attention).eval()
    except (ValueError, TypeError) as error:
        pytest.skip(f"{name} in this release: {error}")


def used(model, use):
    try:
        return enable(model) if use else nullcontext()
    except BackendError as error:
        if RELEASE < (5, 17) and "computes attention by itself" in str(error):
            pytest.skip(str(error))
        raise


# -- models whose attention is not what it seems -----------------------------------------------------------------------


@pytest.mark.parametrize("use", ROUTES)
@pytest.mark.parametrize("layers", [1, 2])
def test_regrouped_heads_are_refused_before_the_second_token_unless_heads_decide_together(prompt, use, layers):
    model = make("diffllama", num_hidden_layers=layers)
    with torch.no_grad(), used(model, use):
        with pytest.raises(BackendError, match="heads"):
            model(prompt(90), past_key_values=CentroidCache(compressor(), interval=1000))
        cache = CentroidCache(compressor("mean"), interval=1000)
        model(prompt(90), past_key_values=cache)
        got = model(prompt(1), past_key_values=cache).logits
    assert cache.stats().merged > 40
    assert got.isfinite().all()


@pytest.mark.parametrize("use", ROUTES)
def test_repeated_heads(prompt, use):
    model = make("jetmoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4)
    with torch.no_grad(), used(model, use):
        with pytest.raises(BackendError, match="heads"):
            model(prompt(90), past_key_values=CentroidCache(compressor(), interval=1000))
        model(prompt(90), past_key_values=CentroidCache(compressor("mean"), interval=1000))


@pytest.mark.parametrize("use", ROUTES)
def test_a_bias_of_the_models_own_is_refused_at_the_first_token(prompt, use):
    fields = {
        "vocab_size": 101,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "decoder_start_token_id": 1,
    }
    model = make("t5", AutoModelForSeq2SeqLM, **fields)
    pair = EncoderDecoderCache(CentroidCache(compressor(budget=1.0)), DynamicCache())
    with torch.no_grad(), used(model, use), pytest.raises(BackendError, match="bias"):
        model(input_ids=prompt(9), decoder_input_ids=prompt(20), past_key_values=pair)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_with_content_reach_old_slots(prompt, attention):
    model = make("doge", attention=attention, keep_window_size=2048)
    cache, plain = CentroidCache(compressor(budget=Budget.tokens(89)), interval=1000), DynamicCache()
    with torch.no_grad(), enable(model):
        for one in (cache, plain):
            model(prompt(90), past_key_values=one)
        got, wanted = (model(prompt(1), past_key_values=one).logits for one in (cache, plain))
    assert cache.stats().merged == 1
    assert (got - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_a_choice_among_old_slots_is_refused(prompt):
    model = make("doge", keep_window_size=24)
    cache = CentroidCache(compressor(), interval=1000)
    with torch.no_grad(), enable(model):
        model(prompt(90), past_key_values=cache)
        with pytest.raises(CacheError, match="choice"):
            model(prompt(1), past_key_values=cache)


def test_enable_looks_whether_it_took():
    model = make("falcon", num_hidden_layers=1)
    before = model.config._attn_implementation
    with pytest.raises(BackendError, match="attention by itself"):
        enable(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("use", ROUTES)
def test_cross_attention_is_told_the_pair_of_caches_to_use(prompt, use):
    fields = {
        "vocab_size": 101, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 1,
    }  # fmt: skip
    model = make("bart", AutoModelForSeq2SeqLM, **fields)
    with torch.no_grad(), used(model, use):
        with pytest.raises(CacheError, match="EncoderDecoderCache"):
            model(input_ids=prompt(9), decoder_input_ids=prompt(20), past_key_values=CentroidCache(compressor()))
        pair = EncoderDecoderCache(CentroidCache(compressor(), interval=1000), DynamicCache())
        for ids in (prompt(90), prompt(1)):
            assert model(input_ids=prompt(9), decoder_input_ids=ids, past_key_values=pair).logits.isfinite().all()
        assert pair.self_attention_cache.stats().merged > 40


def test_models_that_help_themselves_to_keys_are_refused(llama, prompt):
    model, cache = llama(), CentroidCache(compressor())
    with torch.no_grad(), enable(model):
        model(prompt(90), past_key_values=cache)
    there = {"__name__": "transformers.models.some.modeling_some", "cache": cache}
    with pytest.raises(CacheError, match="directly"):
        exec("keys = cache.layers[0].keys", there)
    assert cache.layers[0].keys is not None


def test_sources_tell_what_happens_between_cache_and_attention():
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Straight(torch.nn.Module):
        def forward(self, x, attention_mask, cache, **kwargs):
            k, v = cache.update(x, x, 0, kwargs=kwargs)
            return attend(self, x, k, v, attention_mask, **kwargs)  # noqa: F821

    class Changed(torch.nn.Module):
        def forward(self, x, attention_mask, cache, **kwargs):
            k, v = cache.update(x, x, 0, kwargs=kwargs)
            v = v.roll(1, dims=1)
            return attend(self, x, k, v, attention_mask, **kwargs)  # noqa: F821

    class Keeps(torch.nn.Module):
        def forward(self, x, attention_mask, cache, **kwargs):
            k, v = cache.update(x, x, 0, kwargs=kwargs)
            return attend(self, x, k, v, attention_mask)  # noqa: F821

    class ByHand(torch.nn.Module):
        def forward(self, x, attention_mask, cache, **kwargs):
            k, v = cache.update(x, x, 0, kwargs=kwargs)
            return (x @ k.mT + attention_mask).softmax(-1) @ v

    if STOCK_TAKES_BIAS:
        assert why_not_straight(LlamaAttention) is None
    assert why_not_straight(Straight) is None
    assert why_not_straight(Changed) == REGROUPS
    assert "keyword arguments" in why_not_straight(Keeps)
    assert [attends_by_interface(kind) for kind in (Straight, Keeps, ByHand)] == [True, True, False]


# -- users of one switch -----------------------------------------------------------------------------------------------


def test_the_last_user_undoes(llama):
    model = llama()
    first, second = enable(model), enable(model)
    inside = model.config._attn_implementation
    first.undo()
    first.undo()  # a handle counts once
    assert model.config._attn_implementation == inside != "sdpa"
    third = enable(model)
    second.undo()
    assert model.config._attn_implementation == inside
    third.undo()
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def test_another_attention_chosen_meanwhile_is_left_alone(llama):
    model = llama()
    first = enable(model)
    model.set_attn_implementation("eager")
    second = enable(model)
    first.undo()
    assert model.config._attn_implementation.endswith("eager")
    assert model.config._attn_implementation != "eager"
    second.undo()
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_copy_of_an_enabled_model_can_be_enabled(llama, prompt):
    model = llama()
    with enable(model):
        twin = copy.deepcopy(model)
    handle = enable(twin)
    cache = CentroidCache(compressor(), interval=16)
    twin.generate(prompt(90), past_key_values=cache, max_new_tokens=3)
    handle.undo()
    assert twin.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_requests_in_threads_are_as_alone(llama, prompt, attention):
    model = llama(attention)
    lengths = [(90, 6), (120, 30), (70, 12), (100, 3), (110, 20), (80, 9)]

    def ask(length, new):
        cache = CentroidCache(compressor(), interval=8)
        with enable(model):
            out = model.generate(prompt(length), past_key_values=cache, max_new_tokens=new, do_sample=False)
        return out[0].tolist()

    alone = [ask(*one) for one in lengths]
    together = [None] * len(lengths)

    def run(place):
        together[place] = ask(*lengths[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(lengths))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert together == alone
    assert model.config._attn_implementation == attention


def test_attention_taken_away_in_the_last_layer_is_noticed_in_that_pass(llama, prompt):
    model, cache = llama(), CentroidCache(compressor(), interval=1000)
    with torch.no_grad(), enable(model):
        model(prompt(90), past_key_values=cache)
        hand_over, calls = cache._pass.hand_over, []

        def then_taken_away(*args):
            calls.append(hand_over(*args))
            if len(calls) == len(cache.layers):
                model.set_attn_implementation("eager")
            return calls[-1]

        cache._pass.hand_over = then_taken_away
        with pytest.raises(BackendError, match="without the degrees"):
            model(prompt(1), past_key_values=cache)


# -- what models read off a cache --------------------------------------------------------------------------------------


def test_is_initialized_once_filled(llama, prompt):
    model = llama()
    cache = CentroidCache(compressor(), config=model.config)
    assert not cache.is_initialized
    with torch.no_grad(), enable(model):
        model(prompt(5), past_key_values=cache)
    assert cache.is_initialized
    cache.reset()
    assert not cache.is_initialized


@pytest.mark.parametrize(("held", "new"), [(3, 2), (3, 1), (2, 4), (1, 2)])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_another_number_of_rows_is_refused_before_anything_changes(prompt, held, new, name):
    fields = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    model = make(name, **(fields if name == "gemma3_text" else {}))
    cache = CentroidCache(compressor(), interval=16)
    with torch.no_grad(), enable(model):
        model(prompt(90, held), past_key_values=cache)
        twin = copy.deepcopy(cache)
        with pytest.raises(CacheError, match="rows"):
            model(prompt(3, new), past_key_values=cache)
        ids = prompt(3, held)
        assert model(ids, past_key_values=cache).logits.equal(model(ids, past_key_values=twin).logits)


def test_a_hybrid_that_was_refused_holds_nothing_to_crop_and_can_be_gone_on_with(prompt):
    fields = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    model = make("gemma3_text", attention="eager", **fields)
    cache = CentroidCache(compressor(), interval=16)
    with torch.no_grad():
        with pytest.raises(BackendError, match="enable"):
            model(prompt(90), past_key_values=cache)
        cache.crop(-1)
        assert cache.get_seq_length() == 0
        with enable(model):
            model(prompt(90), past_key_values=cache)
    assert cache.stats().logical == 90


@pytest.mark.parametrize("capacity", ["growing", pytest.param("fixed", marks=needs_shared)])
def test_a_prefix_read_in_inference_mode_is_gone_on_with_outside_of_it(llama, prompt, capacity):
    model, texts = llama(), []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = CentroidCache(compressor(budget=Budget.tokens(60)), interval=16, capacity=capacity)
        with enable(model):
            with mode():
                model(prompt(90), past_key_values=cache)
                model(prompt(1), past_key_values=cache)
            ids = torch.cat((prompt(90), prompt(1), prompt(4)), 1)
            mask = torch.ones_like(ids)
            texts.append(model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40).tolist())
            with torch.no_grad():
                cache.crop(-1)
                model(prompt(1), past_key_values=cache)
    assert texts[0] == texts[1]


def test_a_budget_that_never_holds_what_is_preserved_is_told_once(llama, prompt):
    model = llama()
    model.config.max_position_embeddings = 512
    cache = CentroidCache(presets.centroidkv(0.05))
    with torch.no_grad(), enable(model):
        with pytest.warns(BudgetNotMetWarning, match="within the 512 tokens"):
            model(prompt(90), past_key_values=cache)
        cache.reset()
        model(prompt(90), past_key_values=cache)  # warnings are errors here: a second one would fail
