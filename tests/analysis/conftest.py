"""Tiny random models with a tokenizer of single letters, saved as folders like any model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


class Letters:
    """A tokenizer: every character of a small alphabet is a token."""

    eos_token_id = 2
    bos_token_id = None
    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=[3 + (ord(letter) - 32) % 95 for letter in text])

    def decode_all(self, ids):
        return "".join(chr(32 + int(i) - 3) for i in ids[0])


def make_llama(layers: int = 2):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return _peaky(transformers.LlamaForCausalLM(config).eval())


def make_gemma3():
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=4096, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


def _peaky(model):
    # Larger queries and keys, so that what the cache holds shows in what is predicted.
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 8
        if "lm_head" in name:
            weight.data *= 8
    return model


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture
def gemma3():
    return make_gemma3()


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def ids():
    """A function (length, seed) -> random token ids ``[1, length]``."""

    def make(length: int, seed: int = 0):
        return torch.randint(3, 101, (1, length), generator=torch.Generator().manual_seed(seed))

    return make
