"""The cache inside generate, on tiny random models."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn.functional import pad

from centroidkv import Budget, Compressor, presets
from centroidkv.errors import BackendError, CacheError, RotaryError, StageError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.preserve import Recent, Sinks

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

import transformers  # noqa: E402
from matrix_by_hand import ByHand  # noqa: E402
from matrix_models import SHARES, Family  # noqa: E402


def compressor(budget=0.25):
    return Compressor.builder().preserve(Sinks(4), Recent(16)).budget(budget).build()


def generate(model, ids, cache=None, new=60, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)
    return out[:, ids.shape[1] :]


def by_hand(model, ids, small, interval, new):
    """Greedy text of a decoder that has no cache, mask or attention function of transformers (matrix_by_hand.py)."""
    hand = ByHand(model, Family("Llama", kinds=("full",) * len(model.model.layers)), small, interval)
    token, out = ids[0], []
    for _ in range(new):
        token = hand.feed(token)[-1:].argmax(-1)
        out.append(token)
    return torch.cat(out)[None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_600_tokens_equal_the_run_by_hand_and_stay_within_budget_plus_interval(llama, prompt, attention):
    model, ids = llama(attention), prompt(150)
    small = compressor(Budget.tokens(64))
    sizes = []

    class Watched(CentroidCache):
        def update(self, *args, **kwargs):
            keys, values = super().update(*args, **kwargs)
            if keys.shape[2] != ids.shape[1]:
                sizes.append(keys.shape[2])
            return keys, values

    with enable(model):
        text = generate(model, ids, cache := Watched(small, interval=128), new=600)
    assert max(sizes) <= 64 + 128
    assert cache.stats().logical == 150 + 599
    assert cache.stats().events >= 5
    expected = by_hand(model, ids, small, 128, new=600)
    # Attention kernels differ in the last bits, and one flipped near-tie changes all text after it.
    agree = int((text == expected).int().cumprod(-1).sum())
    if agree < 600:
        assert_near_tie(model, ids, expected, agree, small)


def assert_near_tie(model, ids, expected, index, small):
    """The first differing token must be a tie of the logits of the run by hand, to rounding."""
    with enable(model):
        cache = CentroidCache(small, interval=128)
        logits = model(ids, past_key_values=cache).logits[:, -1]
        for step in range(index):
            logits = model(expected[:, step : step + 1], past_key_values=cache).logits[:, -1]
    top = logits[0].topk(2).values
    assert (top[0] - top[1]).abs() < 1e-4


@torch.no_grad()
def test_prefill_logits_are_bit_equal_with_and_without_compression(llama, prompt):
    model, ids = llama(), prompt(300)
    plain = model(ids).logits
    with enable(model):
        assert torch.equal(model(ids, past_key_values=CentroidCache(compressor(0.25))).logits, plain)
    if SHARES:
        assert torch.equal(model(ids, past_key_values=CentroidCache(compressor(0.25))).logits, plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_budget_one_is_the_plain_model_for_200_tokens(llama, prompt, attention):
    model, ids = llama(attention), prompt(80)
    plain = generate(model, ids, new=200)
    with enable(model):
        assert torch.equal(generate(model, ids, CentroidCache(compressor(1.0)), new=200), plain)
    if SHARES and attention == "sdpa":
        assert torch.equal(generate(model, ids, CentroidCache(compressor(1.0)), new=200), plain)


@pytest.mark.skipif(not SHARES, reason="before 5.24 a cache layer cannot hand degrees to stock attention")
@pytest.mark.parametrize("preset", sorted(presets.ALL))
def test_the_cache_alone_equals_the_enabled_model(llama, prompt, preset):
    model, ids = llama(), prompt(300)
    alone = generate(model, ids, CentroidCache(presets.ALL[preset](0.5), interval=16))
    with enable(model):
        enabled = generate(model, ids, CentroidCache(presets.ALL[preset](0.5), interval=16))
    assert torch.equal(alone, enabled)


@torch.no_grad()
def test_the_degrees_matter(llama, prompt):
    """A run in which the bias is dropped gives other logits, so the tests above would notice."""
    model, ids = llama(), prompt(300)

    def next_logits(forget):
        with enable(model):
            model(ids, past_key_values=(cache := CentroidCache(compressor(0.25))))
            for layer in cache.layers:
                if forget:
                    layer.growing.state.degree.fill_(1.0)
            return model(ids[:, :1], past_key_values=cache).logits

    assert (next_logits(False) - next_logits(True)).abs().max() > 1e-3


def test_attention_that_would_ignore_degrees_is_refused_before_the_first_token(llama, prompt):
    model, ids = llama("eager"), prompt(40)
    cache = CentroidCache(compressor())
    with pytest.raises(BackendError, match="enable"):
        generate(model, ids, cache)
    assert cache.get_seq_length() == 0
    if not SHARES:
        with pytest.raises(BackendError, match="enable"):
            generate(llama("sdpa"), ids, CentroidCache(compressor()))


def test_a_back_end_switched_mid_way_is_refused_too(llama, prompt):
    model, ids = llama(), prompt(100)
    cache = CentroidCache(compressor(), interval=16)
    with enable(model):
        first = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    model.set_attn_implementation("eager")
    with pytest.raises(BackendError):
        model.generate(first, past_key_values=cache, max_new_tokens=5)


def test_undo_leaves_the_model_as_it_was_also_after_an_exception(llama, prompt):
    model = llama("eager")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match="mine"), enable(model):
        raise RuntimeError(f"mine, inside {model.config._attn_implementation}")
    assert model.config._attn_implementation == "eager"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    handle = enable(model)
    inner = enable(model)
    inner.undo()
    assert model.config._attn_implementation == "centroidkv_eager"
    handle.undo()
    handle.undo()
    assert model.config._attn_implementation == "eager"


def test_unsupported_attention_cannot_be_enabled(llama):
    model = llama()
    model.config._attn_implementation_internal = "a_strangers_attention"
    with pytest.raises(BackendError, match="sdpa"):
        enable(model)


@torch.no_grad()
def test_memory_of_the_full_keys_is_released_layer_by_layer(llama, prompt):
    model, ids = llama(), prompt(2000)
    live = []

    class Watched(CentroidCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            held = [layer.keys.untyped_storage().nbytes() for layer in self.layers if layer.keys is not None]
            live.append(sum(held))
            return out

    with enable(model):
        model(ids, past_key_values=(cache := Watched(compressor(0.25))))
    gc.collect()
    per_layer = 2 * 500 * 16 * 4
    assert live == [per_layer, 2 * per_layer, 3 * per_layer]
    stats = cache.stats()
    assert stats.bytes <= 0.27 * stats.bytes_full * 1.1  # head size 16: degree and position weigh more than usual
    assert stats.physical == 500


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padded_rows_equal_their_own_runs(llama, prompt, attention):
    model = llama(attention)
    rows = [prompt(n) for n in (300, 37, 211)]
    ids = torch.cat([pad(row, (300 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (300 - row.shape[1], 0)) for row in rows])
    with enable(model):
        together = generate(model, ids, CentroidCache(compressor(0.3), interval=16), new=50, attention_mask=mask)
        for index, row in enumerate(rows):
            alone = generate(model, row, CentroidCache(compressor(0.3), interval=16), new=50)
            assert torch.equal(together[index : index + 1], alone)


@torch.no_grad()
def test_several_tokens_at_once_equal_one_by_one(llama, prompt):
    model, ids = llama(), prompt(300)
    with enable(model):
        model(ids, past_key_values=(a := CentroidCache(compressor(0.25))))
        model(ids, past_key_values=(b := CentroidCache(compressor(0.25))))
        at_once = model(ids[:, :9], past_key_values=a).logits
        one_by_one = torch.cat([model(ids[:, i : i + 1], past_key_values=b).logits for i in range(9)], 1)
    assert torch.allclose(at_once, one_by_one, atol=1e-4)


def test_a_second_turn_with_full_history_goes_on(llama, prompt):
    model, ids = llama(), prompt(200)
    with enable(model):
        cache = CentroidCache(compressor(0.5), interval=32)
        first = model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False)
        longer = torch.cat((first, prompt(20)), -1)
        mask = torch.ones_like(longer)  # generate would take generated pad tokens for padding
        second = model.generate(longer, attention_mask=mask, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert second.shape[1] == 200 + 30 + 20 + 30
    assert cache.stats().logical == second.shape[1] - 1


def test_beams_move_degrees_and_positions_with_keys(llama, prompt, follow):
    model, ids = llama(), prompt(120)
    with enable(model):
        moved = follow(model, lambda: CentroidCache(compressor(0.5), interval=16), prompt(120, 3))
        assert moved.stats().events > 1
        beams = generate(model, ids, CentroidCache(compressor(0.5), interval=16), num_beams=3, new=40)
        full = generate(model, ids, CentroidCache(compressor(1.0), interval=16), num_beams=3, new=40)
    assert torch.equal(full, generate(model, ids, num_beams=3, new=40))
    assert beams.shape == full.shape


def test_reset_forgets_the_sequence_and_keeps_the_configuration(llama, prompt):
    model = llama()
    with enable(model):
        cache = CentroidCache(compressor(0.25), interval=16)
        generate(model, prompt(150), cache)
        cache.reset()
        again = generate(model, prompt(222), cache)
        fresh = generate(model, prompt(222), CentroidCache(compressor(0.25), interval=16))
    assert torch.equal(again, fresh)


@torch.no_grad()
def test_crop_is_exact_or_refused(llama, prompt):
    model, ids = llama(), prompt(200)
    with enable(model):
        model(ids, past_key_values=(cache := CentroidCache(compressor(0.25), interval=64)))
        expected = model(ids[:, :1], past_key_values=cache).logits
        cache.crop(-1)
        model(ids[:, :30], past_key_values=cache)
        cache.crop(-30)
        assert torch.equal(model(ids[:, :1], past_key_values=cache).logits, expected)
        with pytest.raises(CacheError, match="cannot be separated"):
            cache.crop(-5)


def test_hybrid_models_keep_their_sliding_layers(prompt):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=32, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model, ids = transformers.Gemma3ForCausalLM(config).eval(), prompt(150)
    plain = generate(model, ids, new=40)
    with enable(model):
        assert torch.equal(generate(model, ids, CentroidCache(compressor(1.0)), new=40), plain)
        generate(model, ids, cache := CentroidCache(presets.distinctive(Budget.tokens(80)), interval=16), new=40)
    kinds = [isinstance(layer, CentroidLayer) for layer in cache.layers]
    assert kinds == [False, True, False, True]
    assert cache.stats().layers == 2
    assert cache.get_seq_length() == 150 + 39


def test_unknown_rotation_is_refused_before_the_first_token(llama, prompt):
    model = llama()
    model.config.model_type = "unheard-of"
    with enable(model), pytest.raises(RotaryError, match="unheard-of"):
        generate(model, prompt(50), CentroidCache(presets.distinctive(0.25)))


def test_bad_arguments_are_refused():
    with pytest.raises(StageError, match="Compressor"):
        CentroidCache(0.25)
    with pytest.raises(StageError, match="interval"):
        CentroidCache(compressor(), interval=0)


def test_stats_and_repr_before_and_after(llama, prompt):
    model = llama()
    cache = CentroidCache(compressor(0.25), interval=16)
    assert cache.stats().logical == 0
    with enable(model):
        generate(model, prompt(200), cache, new=10)
    stats = cache.stats()
    assert (stats.logical, stats.physical, stats.merged) == (209, 59, 150)
    assert "209 tokens in 59 slots" in repr(cache)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_between_real_tokens_is_masked_by_slot(llama, prompt, attention):
    """30 tokens, 5 columns of padding, 10 tokens: a batched second turn, or a right-padded first one."""
    model, ids = llama(attention), prompt(40)
    holed = torch.cat((ids[:, :30], torch.zeros(1, 5, dtype=torch.long), ids[:, 30:]), -1)
    mask = torch.cat((torch.ones(1, 30), torch.zeros(1, 5), torch.ones(1, 10)), -1).long()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    small = Compressor.builder().preserve(Sinks(2), Recent(4)).budget(0.5).build()
    with enable(model):
        model(ids, past_key_values=(a := CentroidCache(small)))
        model(holed, attention_mask=mask, position_ids=places, past_key_values=(b := CentroidCache(small)))
        for step in range(4):
            token, one = ids[:, step : step + 1], torch.ones(1, 1, dtype=torch.long)
            mask = torch.cat((mask, one), -1)
            plain = model(token, past_key_values=a).logits
            place = torch.tensor([[40 + step]])
            padded = model(token, attention_mask=mask, position_ids=place, past_key_values=b).logits
            assert torch.allclose(plain, padded, atol=1e-4)


@pytest.mark.skipif(not SHARES, reason="before 5.24 a cache layer cannot hand degrees to stock attention")
@torch.no_grad()
def test_padding_between_real_tokens_is_refused_where_stock_masks_would_hit_the_wrong_slots(llama, prompt):
    model, ids = llama(), prompt(40)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 30:] = 0
    cache = CentroidCache(Compressor.builder().preserve(Sinks(2), Recent(4)).budget(0.5).build())
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(CacheError, match="enable"):
        model(ids[:, :1], attention_mask=torch.cat((mask, mask[:, :1]), -1), past_key_values=cache)


@pytest.mark.skipif(not SHARES, reason="flex attention takes degrees from a cache only from 5.24")
@torch.no_grad()
def test_padding_is_read_from_flex_block_masks(llama, prompt):
    model, ids = llama("flex_attention"), prompt(60, batch=2)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :35] = 0
    model(ids, attention_mask=mask, past_key_values=(cache := CentroidCache(compressor(0.5))))
    assert cache.layers[0].growing.state.degree.sum(-1).tolist() == [[60.0, 60.0], [25.0, 25.0]]


def test_batches_with_an_absolute_budget_keep_every_token(llama, prompt):
    model = llama()
    rows = [prompt(70), pad(prompt(9), (61, 0))]
    masks = [torch.ones(1, 70, dtype=torch.long), pad(torch.ones(1, 9, dtype=torch.long), (61, 0))]
    small = Compressor.builder().preserve(Sinks(2), Recent(4)).budget(Budget.tokens(20)).build()
    with enable(model):
        cache = CentroidCache(small, interval=8)
        generate(model, torch.cat(rows), cache, new=40, attention_mask=torch.cat(masks))
    state = cache.layers[0].growing.state
    assert state.degree.sum(-1).tolist() == [[109.0, 109.0], [48.0, 48.0]]


def test_reset_makes_the_cache_free_for_another_model(llama, prompt):
    cache = CentroidCache(compressor(0.25), interval=16)
    first, second = llama(), llama("eager", seed=1)
    with enable(first):
        generate(first, prompt(100), cache)
    cache.reset()
    with pytest.raises(BackendError, match="enable"):
        generate(second, prompt(100), cache)
    cache.reset()
    with enable(second):
        again = generate(second, prompt(100), cache)
        assert torch.equal(again, generate(second, prompt(100), CentroidCache(compressor(0.25), interval=16)))


def test_a_copy_goes_on_as_the_original_would(llama, prompt):
    import copy

    model, ids = llama("eager"), prompt(100)
    cache = CentroidCache(compressor(0.25), interval=16)
    with enable(model), torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    twin = copy.deepcopy(cache)
    with enable(model):
        assert torch.equal(generate(model, ids, twin), generate(model, ids, cache))


@torch.no_grad()
def test_a_half_finished_forward_pass_is_noticed(llama, prompt):
    model, ids = llama(), prompt(50)
    cache = CentroidCache(compressor(0.5))
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with enable(model):
        with pytest.raises(RuntimeError, match="lost"):
            model(ids, past_key_values=cache)
        broken.remove()
        with pytest.raises(CacheError, match=r"reset\(\)"):
            model(ids, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)


def test_compressors_whose_sizes_depend_on_the_data_are_refused():
    from centroidkv.matching import ThresholdMatching

    with pytest.raises(StageError, match="ahead of the data"):
        CentroidCache(Compressor.builder().matching(ThresholdMatching(0.5)).build())
    with pytest.raises(StageError, match="ahead of the data"):
        CentroidCache(Compressor.builder().preserve(lambda state: state.positions < 4).build())


def test_undo_respects_a_later_choice(llama):
    model = llama()
    handle = enable(model)
    model.set_attn_implementation("eager")
    handle.undo()
    assert model.config._attn_implementation == "eager"


def test_a_layer_the_cache_does_not_have_is_refused_by_name(llama):
    cache = CentroidCache(compressor(), config=llama().config)
    keys = torch.randn(1, 2, 5, 16)
    with pytest.raises(CacheError, match="3 layers, the model asks for layer 7"):
        cache.update(keys, keys, 7)
