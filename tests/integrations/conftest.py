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


@pytest.fixture
def follow():
    """A function that reads three rows, permutes them as a beam search does, and holds each to its own run from then.

    It compares the degrees of every layer and the logits of ``steps`` more tokens, and returns the cache.
    """

    @torch.no_grad()
    def run(model, make_cache, ids, steps=24, order=(2, 0, 0)):
        draw = torch.Generator().manual_seed(5)
        first = torch.randint(3, 101, (3, 9), generator=draw)  # after the prompt's event, before the rows move
        then = torch.randint(3, 101, (len(order), steps), generator=draw)
        together = make_cache()
        alone = [make_cache() for _ in order]
        for piece in (ids, *first.split(1, dim=1)):
            model(piece, past_key_values=together)
            for row, cache in zip(order, alone, strict=True):
                model(piece[row : row + 1], past_key_values=cache)
        together.reorder_cache(torch.tensor(order))
        for step in range(steps):
            logits = model(then[:, step : step + 1], past_key_values=together).logits
            for place, cache in enumerate(alone):
                own = model(then[place : place + 1, step : step + 1], past_key_values=cache).logits
                assert torch.allclose(logits[place], own[0], atol=1e-4), (step, place)
                for layer, mine in zip(together.layers, cache.layers, strict=True):
                    degree, wanted = layer.growing.state.degree[place], mine.growing.state.degree[0]
                    assert degree[degree > 0].equal(wanted[wanted > 0]), (step, place)
        return together

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model for lm-eval, saved."""
    from tiny_lm import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def lm(folder):
    """A function (options) -> CentroidLM on the tiny model."""
    from centroidkv.integrations.lm_eval import CentroidLM

    def make(**options):
        return CentroidLM(folder, device="cpu", **{"dtype": "float32", "preset": "centroidkv", **options})

    return make
