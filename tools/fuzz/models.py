"""Tiny random models of several families. Copied into failing scripts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers

VOCABULARY, WINDOW = 97, 24
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 4096}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.25}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "phi3": ("Phi3", {}),
    "gptneox": ("GPTNeoX", {}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
}


def layer_kinds(family: str, layers: int) -> list[str]:
    """Whether each layer attends fully ("full") or in a window ("sliding")."""
    if family == "mistral-sliding":
        return ["sliding"] * layers
    if family == "gemma3":  # the first layer slides, the next does not
        return [("sliding", "full")[i % 2] for i in range(layers)]
    return ["full"] * layers


def make_model(family: str, layers: int, heads: int, kv_heads: int, attention: str, dtype: str, seed: int) -> Any:
    """A model whose attention matters, because its weights are large."""
    name, more = FAMILIES[family]
    options = {
        **SIZES, **SPECIAL, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        **more,
    }  # fmt: skip
    if family == "gemma3":
        options["layer_types"] = [f"{kind}_attention" for kind in layer_kinds(family, layers)]
    torch.manual_seed(seed)
    config = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(getattr(torch, dtype))
    model.set_attn_implementation(attention)
    return model


@functools.lru_cache(maxsize=24)
def three_models(*what: Any) -> tuple[Any, Any, Any]:
    """:func:`make_model`, and two for the oracle: the same, and in float64. Nobody enables anything in those."""
    model = make_model(*what)
    return model, copy.deepcopy(model), copy.deepcopy(model).double()


def attention_modules(model: Any) -> list[Any]:
    """The attention module of each layer."""
    layers = model.gpt_neox.layers if hasattr(model, "gpt_neox") else model.model.layers
    return [getattr(layer, "self_attn", None) or layer.attention for layer in layers]
