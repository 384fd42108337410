"""Tiny random models, and a greedy decoder that never uses a cache."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture
def llama():
    """A function (attention back end, seed) -> random 3-layer Llama with grouped queries."""

    def make(attention: str = "sdpa", seed: int = 0):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        # Larger queries and keys make attention peaky, so that a lost bias or position shows in the text.
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.data *= 8
        model.set_attn_implementation(attention)
        return model

    return make


@pytest.fixture
def prompt():
    """A function (length, batch) -> random token ids."""

    def make(length: int, batch: int = 1):
        return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(length))

    return make
