"""CentroidPress inside kvpress, on tiny random models. Runs where kvpress is installed: ``make peers``."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import BackendError, BudgetError, CacheError, RotaryError, StageError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.matching import ThresholdMatching
from centroidkv.preserve import Recent, Sinks

kvpress = pytest.importorskip("kvpress", reason="kvpress needs an environment of its own: make peers")

from centroidkv.integrations.kvpress import CentroidPress, PressedLayer  # noqa: E402

NEVER = 10**9


def clustering(budget=0.25):
    return Compressor.builder().preserve(Sinks(4), Recent(16)).budget(budget).build()


@torch.no_grad()
def pressed(model, press, ids):
    """The cache after a prefill of ``ids`` under ``press``, as kvpress's pipeline does it."""
    cache = DynamicCache()
    with press(model):
        model.model(input_ids=ids, past_key_values=cache)
    return cache


@torch.no_grad()
def read(model, cache, tokens, start):
    """Logits of ``tokens [1, m]`` at positions ``start``..., the first two at once and the others one by one."""
    out = []
    for piece in (tokens[:, :2], *tokens[:, 2:].split(1, 1)):
        places = torch.arange(start, start + piece.shape[1])[None]
        out.append(model(piece, past_key_values=cache, position_ids=places).logits)
        start += piece.shape[1]
    return torch.cat(out, 1)


def attention_of(model):
    return model.config._attn_implementation


# -- the cross-check: the same tokens, the same logits as kvpress's own presses --------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(("ours", "theirs"), [("knorm", "KnormPress"), ("keydiff", "KeyDiffPress")])
def test_an_evicting_preset_equals_kvpresss_own_press(llama, prompt, ours, theirs, ratio, attention):
    # No token twice: equal tokens have keys of equal norm in the first layer, and ties are anyone's choice.
    model, ids, tail = llama(attention), 3 + torch.randperm(98)[None], prompt(12)
    press = CentroidPress(presets.ALL[ours](1 - ratio))
    mine = pressed(model, press, ids)
    other = pressed(model, getattr(kvpress, theirs)(compression_ratio=ratio), ids)
    assert attention_of(model) == attention
    for a, b in zip(mine.layers, other.layers, strict=True):
        assert a.keys.shape == b.keys.shape == (1, 2, math.floor(98 * (1 - ratio)), 16)
        assert by_row(a.keys).equal(by_row(b.keys))
        assert by_row(a.values).equal(by_row(b.values))
    torch.testing.assert_close(read(model, mine, tail, 98), read(model, other, tail, 98), atol=1e-5, rtol=0)


def by_row(x):
    """Rows of ``[1, H, n, D]`` sorted by their first channel: kvpress leaves kept tokens in order of score."""
    return x.gather(2, x[..., :1].argsort(2).expand_as(x))


def test_ratio_zero_and_budget_one_change_nothing(llama, prompt):
    model, ids, tail = llama(), prompt(100), prompt(8)
    plain = DynamicCache()
    with torch.no_grad():
        model.model(input_ids=ids, past_key_values=plain)
    cache = pressed(model, CentroidPress(presets.centroidkv(1.0)), ids)
    assert attention_of(model) == "sdpa"
    assert not any(isinstance(layer, PressedLayer) for layer in cache.layers)
    assert torch.equal(read(model, cache, tail, 100), read(model, plain, tail, 100))


# -- merging: what CentroidCache does with the same compressor -------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", ["centroidkv", "distinctive", "balanced", "tome", "kmeans"])
def test_a_merging_press_equals_centroidcache(llama, prompt, preset, attention):
    model, ids, tail = llama(attention), prompt(400), prompt(12)
    compressor = presets.ALL[preset](0.3)
    cache = pressed(model, CentroidPress(compressor), ids)
    twin = CentroidCache(compressor, interval=NEVER)
    with torch.no_grad(), enable(model):
        model.model(input_ids=ids, past_key_values=twin)
        slots = [own.budget.slots(400) for own in compressor.for_layers([1 / 6, 1 / 2, 5 / 6])]
        assert sum(slots) == 3 * 120
        for layer, other, held in zip(cache.layers, twin.layers, slots, strict=True):
            state = other.growing.state
            assert layer.get_seq_length() == state.slots == held
            assert layer.degree.equal(state.degree)
            torch.testing.assert_close(layer.keys, state.keys, atol=1e-5, rtol=0)
        expected = read(model, twin, tail, 400)
    got = read(model, cache, tail, 400)
    assert cache.layers[0].get_seq_length() == slots[0] + 12
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [0.7, Budget.tokens(300)], ids=repr)
def test_layers_that_keep_everything_beside_others_that_do_not(llama, prompt, attention, budget):
    model, ids, tail = llama(attention), prompt(400), prompt(7)
    cache = pressed(model, CentroidPress(presets.balanced(budget)), ids)
    assert [layer.get_seq_length() < 400 for layer in cache.layers] == [True, False, True]
    twin = CentroidCache(presets.balanced(budget), interval=NEVER)
    with torch.no_grad(), enable(model):
        model.model(input_ids=ids, past_key_values=twin)
        expected = read(model, twin, tail, 400)
    torch.testing.assert_close(read(model, cache, tail, 400), expected, atol=1e-5, rtol=0)


def test_degrees_matter_and_reach_the_decode_steps(llama, prompt):
    model, ids, tail = llama(), prompt(300), prompt(8)
    cache = pressed(model, CentroidPress(clustering()), ids)
    assert cache.layers[1].degree.sum(-1).eq(300).all()
    blind = copy.deepcopy(cache)
    for layer in blind.layers:
        layer.degree = torch.ones_like(layer.degree)
    assert (read(model, cache, tail, 300) - read(model, blind, tail, 300)).abs().max() > 1e-2


@torch.no_grad()
def test_generate_inside_the_press_goes_on_at_the_right_positions(llama, prompt):
    model, ids = llama(), prompt(300)
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    press = CentroidPress(clustering())
    with press(model):
        text = model.generate(ids, past_key_values=DynamicCache(), **options)
    with enable(model):
        expected = model.generate(ids, past_key_values=CentroidCache(clustering(), interval=NEVER), **options)
    assert text.equal(expected)


@torch.no_grad()
def test_beams_move_with_their_degrees(llama, prompt):
    model, ids = llama(), prompt(300)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with CentroidPress(clustering())(model):
        text = model.generate(ids, past_key_values=DynamicCache(), **options)
    with enable(model):
        expected = model.generate(ids, past_key_values=CentroidCache(clustering(), interval=NEVER), **options)
    assert text.equal(expected)


@torch.no_grad()
def test_sliding_window_layers_are_left_alone(prompt):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=64, query_pre_attn_scalar=16, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="sdpa",
    )  # fmt: skip
    model, ids, tail = transformers.Gemma3ForCausalLM(config).eval(), prompt(300), prompt(12)
    cache = pressed(model, CentroidPress(presets.balanced(0.3)), ids)
    assert [layer.get_seq_length() for layer in cache.layers] == [300, 90, 300, 90]
    twin = CentroidCache(presets.balanced(0.3), interval=NEVER)
    with enable(model):
        model.model(input_ids=ids, past_key_values=twin)
        expected = read(model, twin, tail, 300)
    torch.testing.assert_close(read(model, cache, tail, 300), expected, atol=1e-5, rtol=0)


# -- kvpress's pipeline ----------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(llama):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:99]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="a", model_max_length=4096)
    return transformers.pipeline("kv-press-text-generation", model=llama(), tokenizer=fast)


CONTEXT = "the quick brown fox jumps over the lazy dog. " * 8


@torch.no_grad()
def by_centroidcache(pipe, compressor, question, new=16):
    """What the pipeline has to answer, by CentroidCache and a loop that counts positions."""
    encode = lambda text: pipe.tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)  # noqa: E731
    context, piece = encode("a" + CONTEXT), encode(question + "\n")
    cache, out = CentroidCache(compressor, interval=NEVER), []
    with enable(pipe.model):
        pipe.model.model(input_ids=context, past_key_values=cache)
        for _ in range(new):
            piece = pipe.model(piece, past_key_values=cache).logits[:, -1:].argmax(-1)
            out.append(piece[0, 0])
    return pipe.tokenizer.decode(torch.stack(out), skip_special_tokens=True)


@pytest.mark.parametrize("preset", ["centroidkv", "balanced", "keydiff"])
def test_the_pipeline_answers_several_questions_and_leaves_the_model_as_it_was(pipe, preset):
    compressor = presets.ALL[preset](0.3)
    press, questions = CentroidPress(compressor), ["why?", "who jumps?"]
    answers = pipe(CONTEXT, questions=questions, press=press, max_new_tokens=16)["answers"]
    assert attention_of(pipe.model) == "sdpa"
    assert answers == [by_centroidcache(pipe, compressor, question) for question in questions]
    alone = pipe(CONTEXT, question=questions[0], press=press, max_new_tokens=16)["answer"]
    assert alone == answers[0]
    assert "self_attn" not in str(press)


def test_the_evaluations_set_up_works(pipe):
    """What kvpress's evaluate.py does to any press: look for the attribute, set it, record str(press)."""
    press = CentroidPress(presets.centroidkv(1.0))
    assert hasattr(press, "compression_ratio")
    press.compression_ratio = 0.7
    assert press.compressor.budget == Budget.ratio(0.3)
    with torch.inference_mode():
        answer = pipe(CONTEXT, questions=["why?"], press=press, max_new_tokens=8, max_context_length=300)["answers"]
    assert len(answer) == 1
    assert str(press).startswith("CentroidPress(Compressor(")
    assert "\n" not in str(press)


# -- the two ways to say how much ------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [0.0, 0.1, 0.25, 0.3, 0.7, 0.9, 0.95])
def test_compression_ratio_is_one_minus_the_budget_without_rounding(removed):
    press = CentroidPress(presets.knorm(0.5))
    press.compression_ratio = removed
    assert press.compression_ratio == removed
    assert press.compressor.budget.slots(1000) == 1000 - round(1000 * removed)


@pytest.mark.parametrize("removed", [1.0, -0.1, 1.5, True, "half", None])
def test_a_compression_ratio_that_leaves_nothing_is_refused(removed):
    press = CentroidPress(presets.knorm(0.5))
    with pytest.raises(BudgetError, match="at least one slot"):
        press.compression_ratio = removed
    assert press.compression_ratio == 0.5


def test_a_number_of_slots_works_but_has_no_ratio(llama, prompt):
    press = CentroidPress(clustering(Budget.tokens(40)))
    assert [layer.get_seq_length() for layer in pressed(llama(), press, prompt(200)).layers] == [40] * 3
    with pytest.raises(BudgetError, match=r"Budget\.tokens\(40\) has no compression_ratio"):
        _ = press.compression_ratio


# -- the loan --------------------------------------------------------------------------------------------------------


def test_the_model_is_lent_until_the_last_clustered_cache_is_gone(llama, prompt):
    model = llama()
    first = pressed(model, CentroidPress(clustering()), prompt(120))
    second = pressed(model, CentroidPress(clustering(0.5)), prompt(130))
    assert attention_of(model) == "centroidkv_sdpa"
    with torch.no_grad():
        plain = model(prompt(9)).logits
    del first
    assert attention_of(model) == "centroidkv_sdpa"
    read(model, second, prompt(4), 130)
    third = copy.deepcopy(second)
    del second
    read(model, third, prompt(4), 134)
    del third
    gc.collect()
    assert attention_of(model) == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(prompt(9)).logits, plain)


def test_an_exception_inside_gives_the_model_back_at_once(llama, prompt):
    model, cache = llama(), DynamicCache()
    with torch.no_grad(), pytest.raises(ZeroDivisionError), CentroidPress(clustering())(model):  # noqa: PT012
        model.model(input_ids=prompt(120), past_key_values=cache)
        _ = 1 / 0
    assert attention_of(model) == "sdpa"
    assert not model.model.layers[0].self_attn._forward_hooks
    with pytest.raises(BackendError, match=r"'sdpa'.*ignore their degrees.*enable\(model\)"):
        read(model, cache, prompt(3), 120)
    with enable(model):
        read(model, cache, prompt(3), 120)


def test_leaving_between_the_cache_and_the_attention_is_noticed_in_that_layer(llama, prompt, monkeypatch):
    """The hooks of ``enable`` stay as long as a layer waits for the attention to sign."""
    model = llama()
    cache = pressed(model, CentroidPress(clustering()), prompt(120))
    plain, last = PressedLayer.update, cache.layers[-1]

    def update(self, *args, **kwargs):
        attended = plain(self, *args, **kwargs)
        if self is last:
            self._loan.end()
        return attended

    monkeypatch.setattr(PressedLayer, "update", update)
    with pytest.raises(BackendError, match="without the degrees it was handed"):
        read(model, cache, prompt(3), 120)
    assert attention_of(model) == "sdpa"
    assert not model.model.layers[0].self_attn._forward_hooks


def test_another_attention_chosen_meanwhile_is_refused_and_then_kept(llama, prompt):
    model = llama()
    cache = pressed(model, CentroidPress(clustering()), prompt(120))
    model.set_attn_implementation("eager")
    with pytest.raises(BackendError, match="'eager'"):
        read(model, cache, prompt(3), 120)
    fresh = pressed(model, CentroidPress(clustering()), prompt(120))
    read(model, fresh, prompt(3), 120)
    del cache, fresh
    gc.collect()
    assert attention_of(model) == "eager"


# -- what is refused -------------------------------------------------------------------------------------------------


def test_compressors_whose_sizes_depend_on_the_data_are_refused():
    with pytest.raises(StageError, match="depend on the data"):
        CentroidPress(Compressor.builder().matching(ThresholdMatching(0.9)).build())
    with pytest.raises(StageError, match=r"presets\.centroidkv"):
        CentroidPress(0.25)


@torch.no_grad()
def run(model, press, ids, cache=None, **options):
    with press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache() if cache is None else cache, **options)


def test_other_caches_are_refused(llama, prompt):
    model, ids, press = llama(), prompt(120), CentroidPress(clustering())
    static = transformers.StaticCache(config=model.config, max_cache_len=150)
    with pytest.raises(CacheError, match="got a StaticLayer"):
        run(model, press, ids, static)

    # A real one needs a package for its numbers; the refusal comes before any number is asked for.
    quantized = transformers.QuantizedCache.__new__(transformers.QuantizedCache)
    transformers.Cache.__init__(quantized, layer_class_to_replicate=DynamicLayer)
    with pytest.raises(CacheError, match="QuantizedCache"):
        run(model, press, ids, quantized)


def test_a_padded_batch_is_refused(llama, prompt):
    ids = prompt(120, 2)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with pytest.raises(CacheError, match="CentroidCache, which takes padded batches"):
        run(llama(), CentroidPress(clustering()), ids, attention_mask=mask)


@pytest.mark.parametrize("first", [True, False])
def test_presses_that_remove_tokens_before_or_after_are_refused(llama, prompt, first):
    model, press, knorm = llama(), CentroidPress(clustering()), kvpress.KnormPress(0.5)
    both = kvpress.ComposedPress([press, knorm] if first else [knorm, press])
    message = "Nothing can be removed after CentroidPress" if first else "another press removed some before"
    with pytest.raises(CacheError, match=message), enable(model):
        run(model, both, prompt(120))


def test_presses_that_mask_keys_are_refused(llama, prompt):
    model, ids = llama(), prompt(120)
    dms = kvpress.DMSPress(kvpress.KnormPress(), threshold=1e9, sliding_window_size=16)
    with pytest.raises(CacheError, match="masks single keys"), enable(model):
        run(model, kvpress.ComposedPress([dms, CentroidPress(clustering())]), ids)
    cache = pressed(model, CentroidPress(clustering()), ids)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = (torch.tensor([0]),) * 3
    with pytest.raises(CacheError, match="masks single keys"):
        read(model, cache, prompt(3), 120)


def test_inside_another_press_a_merging_press_asks_for_enable(llama, prompt):
    model, ids = llama(), prompt(200)
    outer = kvpress.PrefillDecodingPress(prefilling_press=CentroidPress(clustering()))
    with pytest.raises(BackendError, match=r"with enable\(model\)"):
        run(model, outer, ids)
    with enable(model):
        cache = pressed(model, outer, ids)
        got = read(model, cache, prompt(6), 200)
    expected = read(model, pressed(model, CentroidPress(clustering()), ids), prompt(6), 200)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("first", [True, False])
def test_a_press_that_thins_channels_goes_together_with_it(llama, prompt, first):
    model, ids, press = llama(), prompt(200), CentroidPress(clustering())
    think = kvpress.ThinKPress(key_channel_compression_ratio=0.5, window_size=16)
    both = kvpress.ComposedPress([press, think] if first else [think, press])
    with enable(model):
        cache = pressed(model, both, ids)
        logits = read(model, cache, prompt(6), 200)
    assert all(layer.degree.sum(-1).eq(200).all() for layer in cache.layers)
    assert all(layer.keys[:, :, :50].eq(0).all(2).any() for layer in cache.layers)
    assert logits.isfinite().all()
    assert both.compression_ratio is not None


def test_wrappers_that_call_compress_take_evicting_compressors_only(llama, prompt):
    keys = torch.randn(1, 2, 40, 16)
    with pytest.raises(StageError, match="degrees of merged tokens would be lost"):
        CentroidPress(clustering()).compress(None, None, keys, keys, None, {})
    kept, _ = CentroidPress(presets.knorm(0.5)).compress(None, None, keys, keys, None, {})
    assert kept.shape[2] == 20


def test_a_context_too_short_for_what_is_preserved_is_refused(llama, prompt):
    with pytest.raises(BudgetError, match="raise the budget"):
        run(llama(), CentroidPress(presets.centroidkv(0.25)), prompt(100))


def test_attention_that_cannot_take_degrees_is_refused_before_the_prefill(llama, prompt):
    with pytest.raises(BackendError, match="flex_attention"):
        run(llama("flex_attention"), CentroidPress(clustering()), prompt(100))


def test_a_model_of_sliding_windows_only_is_refused(prompt):
    config = transformers.MistralConfig(
        vocab_size=101, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=32,
    )  # fmt: skip
    with pytest.raises(CacheError, match="sliding window"):
        run(transformers.MistralForCausalLM(config), CentroidPress(clustering()), prompt(100))


def test_unknown_rope_is_refused_and_can_be_given(llama, prompt, monkeypatch):
    from centroidkv import Rotary
    from centroidkv.integrations import rope

    monkeypatch.setattr(rope, "HALF_LAYOUT", frozenset())
    model, ids = llama(), prompt(400)
    with pytest.raises(RotaryError):
        run(model, CentroidPress(presets.distinctive(0.3)), ids)
    run(model, CentroidPress(presets.distinctive(0.3), rotary=Rotary.from_theta(1e4, 16)), ids)


def test_a_pressed_layer_is_for_one_context(llama, prompt):
    cache = pressed(llama(), CentroidPress(clustering()), prompt(120))
    with pytest.raises(CacheError, match="make a new cache"):
        cache.reset()
    with pytest.raises(CacheError, match="Nothing can be removed"):
        cache.crop(10)
    cache.crop(10_000)
