"""ln N on its way to attention: every back end agrees, and kernels that take no bias get it in the keys."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

transformers = pytest.importorskip("transformers")

from matrix_case import Case  # noqa: E402
from matrix_models import CACHE_NAME, FAMILIES, RELEASE, needs_shared  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import flash_attention_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from centroidkv import Budget  # noqa: E402
from centroidkv.errors import BackendError  # noqa: E402
from centroidkv.integrations.transformers import CentroidCache, enable  # noqa: E402
from centroidkv.testing.tolerances import attention_bound  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


def flash_like(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """Takes what a flash kernel takes: one head size, a multiple of 8; a 2-D mask or none; and nothing to add."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert attention_mask is None or attention_mask.ndim == 2
    assert "position_bias" not in kwargs
    groups, length, slots = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    hidden = torch.ones(length, slots, dtype=torch.bool).triu(slots - length + 1)[None, None]
    if attention_mask is not None:
        hidden = hidden | (attention_mask == 0)[:, None, None]
    logits = scaling * query @ key.mT
    out = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1) @ value
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash():
    """The stand-in, registered as transformers registers its flash attentions."""
    AttentionInterface.register("stand_in_without_bias", flash_like)
    AttentionMaskInterface.register("stand_in_without_bias", flash_attention_mask)
    return "stand_in_without_bias"


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "qwen3"])
def test_a_kernel_without_bias_gives_the_run_by_hand(flash, family):
    case = Case(FAMILIES[family])
    ids = case.prompt(48)
    with case.attending(flash):
        text = case.generate(ids, cache := case.cache())
        case.compressed(cache)
        case.by_hand(text, [[ids[0]]])
        case.plain_at_full_budget(lambda cache: case.generate(ids, cache))


def test_a_kernel_without_bias_serves_padded_rows_and_several_tokens_at_once(flash):
    case = Case(FAMILIES["llama"])
    rows = [case.prompt(n) for n in (44, 7, 23)]
    ids = torch.cat([pad(row, (44 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (44 - row.shape[1], 0)) for row in rows])
    with case.attending(flash):
        text = case.generate(ids, case.cache(), attention_mask=mask)
        case.by_hand(text, [[row[0]] for row in rows])
        case.forward(rows[0], cache := case.cache())
        more, hand = case.prompt(7, seed=1), case.hand()
        hand.feed(rows[0][0])
        case.same(case.forward(more, cache)[0], hand.feed(more[0]))


@needs_shared
def test_a_kernel_without_bias_serves_a_fixed_capacity(flash):
    """A step's degrees mark the empty slots as well; they come by another way than a growing cache's."""
    case = Case(FAMILIES["llama"])
    ids, mask = torch.cat((case.prompt(40), case.prompt(40, seed=1))), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    texts = []
    for attention in ("sdpa", flash):
        with case.attending(attention):
            cache = CentroidCache(case.compressor(Budget.tokens(12)), interval=8, capacity="fixed")
            texts.append(case.generate(ids, cache, new=20, attention_mask=mask))
            assert cache.stats().events > 1
    assert torch.equal(texts[0].ids, texts[1].ids)
    case.same(texts[1].logits, texts[0].logits)


def test_undo_gives_the_kernel_back_and_the_cache_alone_is_refused(flash):
    case = Case(FAMILIES["llama"])
    with case.attending(flash):
        assert case.model.config._attn_implementation == "centroidkv_" + flash
    assert case.model.config._attn_implementation == flash
    with pytest.raises(BackendError, match="enable"):
        case.generate(case.prompt(30), case.cache())


def test_what_key_channels_cannot_do_is_refused(flash):
    wide = FAMILIES["llama"].make(head_dim=256)
    wide.set_attn_implementation(flash)
    with pytest.raises(BackendError, match="256"):
        enable(wide)
    capped = FAMILIES["llama"].make()
    capped.config.attn_logit_softcapping = 30.0
    capped.set_attn_implementation(flash)
    with pytest.raises(BackendError, match="softcapping"):
        enable(capped)


BACK_ENDS = {"sdpa": True, "eager": True, "stand_in_without_bias": True}
if RELEASE >= (5, 24):
    BACK_ENDS |= {"sdpa, cache alone": False}


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 5])
def test_back_ends_agree_on_one_compressed_cache(flash, new, monkeypatch):
    """What the first layer attends to, in every back end: to the bound that follows from its tensors."""
    case = Case(FAMILIES["llama"])
    ids, more = case.prompt(48), case.prompt(new, seed=1)
    seen, outs = [], {}
    with case.attending("sdpa"):
        case.forward(ids, case.cache())
    for name, with_enable in BACK_ENDS.items():
        with case.attending(name.split(",")[0], with_enable):
            cache = case.cache()
            case.forward(ids, cache)
            kept = []
            attention = case.model.model.layers[0].self_attn
            hook = attention.o_proj.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
            state = cache.layers[0].growing.state
            case.forward(more, cache)
            hook.remove()
            outs[name] = kept[0]
            hidden = case.model.model.layers[0].input_layernorm(case.model.model.embed_tokens(more))
            seen = [attention.q_proj(hidden), state]
    query, state = seen[0].view(1, new, 4, 8).transpose(1, 2), seen[1]
    bound = attention_bound(query, state.keys, state.values, state.degree, 8**-0.5)
    for name, out in outs.items():
        assert (out - outs["sdpa"]).abs().max() <= 2 * bound, name


@pytest.mark.skipif(RELEASE < (5, 24), reason="flex attention takes degrees from a cache only from 5.24")
@torch.no_grad()
def test_flex_attention_agrees_with_the_others():
    """Not compiled: with a bias, Inductor of torch 2.13 writes C++ for the CPU that does not compile."""
    case = Case(FAMILIES["llama"])
    ids, more = case.prompt(48), case.prompt(5, seed=1)
    logits = {}
    for name in ("sdpa", "flex_attention"):
        with case.attending(name, with_enable=False), torch.compiler.set_stance("force_eager"):
            cache = case.cache()
            case.forward(ids, cache)
            logits[name] = case.forward(more, cache)
    case.same(logits["flex_attention"], logits["sdpa"])


def test_both_names_of_the_cache_argument_are_the_same_run():
    case = Case(FAMILIES["llama"])
    ids, texts = case.prompt(48), []
    with case.attending("sdpa"):
        for name in {"past_key_values", CACHE_NAME}:
            options = {name: case.cache(), "attention_mask": torch.ones_like(ids), "do_sample": False}
            texts.append(case.model.generate(ids, max_new_tokens=8, **options))
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_importing_and_enabling_change_no_stock_function():
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa"):
        case.generate(case.prompt(20), CentroidCache(case.compressor()))
    after = ALL_ATTENTION_FUNCTIONS._global_mapping
    assert all(after[name] is function for name, function in before.items() if not name.startswith("centroidkv_"))
