"""Tiny random models of the families in the matrix, and the ones that must be refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE_NAME = "cache" if RELEASE >= (5, 24) else "past_key_values"
SHARES = RELEASE >= (5, 24)
"""Whether attention modules share their keyword arguments with the cache, so that it can do without ``enable``."""
needs_shared = pytest.mark.skipif(not SHARES, reason="needs the keyword arguments of 5.24")
VOCABULARY, WINDOW = 97, 32


@dataclass(frozen=True)
class Family:
    """How to make one tiny model; ``kinds`` per layer, ``theta`` of its full-attention layers' RoPE."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("full", "full")
    theta: float = 1e4

    def make(self, attention: str = "sdpa", **others: Any) -> Any:
        options = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": len(self.kinds),
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2, **self.options, **others,
        }  # fmt: skip
        torch.manual_seed(0)
        config = getattr(transformers, self.name + ("TextConfig" if self.name == "Gemma3" else "Config"))(**options)
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).eval()
        model.set_attn_implementation(attention)
        return model

    @property
    def slides(self) -> bool:
        return "sliding" in self.kinds


FAMILIES = {
    "llama": Family("Llama"),
    "llama-mqa": Family("Llama", {"num_key_value_heads": 1}),
    "llama-mha": Family("Llama", {"num_key_value_heads": 4}),
    "mistral": Family("Mistral", {"sliding_window": None}),
    "mistral-sliding": Family("Mistral", {"sliding_window": WINDOW}, ("sliding", "sliding")),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", {"head_dim": 8}),
    "phi3": Family("Phi3"),
    "gemma3": Family(
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        ("sliding", "full", "sliding"),
        theta=1e6,
    ),
}


def _linear() -> Any:
    return Family(
        "Qwen3Next",
        {
            "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "mlp_only_layers": [0, 1], "num_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ).make()  # fmt: skip


def _latent() -> Any:
    return Family(
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        },
    ).make()  # fmt: skip


def _mamba_hybrid() -> Any:
    return Family(
        "Jamba",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 100, "expert_layer_offset": 50,
            "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 2,
        },
    ).make()  # fmt: skip


def _mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=None
    )
    return transformers.MambaForCausalLM(config).eval()


def _shared_keys() -> Any:
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_kv_shared_layers=2, sliding_window=16, pad_token_id=0, eos_token_id=None,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config).eval()


REFUSED = {
    "qwen3-next (linear attention)": (_linear, "linear|keys to cluster"),
    "deepseek-v3 (latent attention)": (_latent, "latent attention"),
    "jamba (Mamba and attention)": (_mamba_hybrid, "mamba|linear|keys to cluster"),
    "mamba (no attention)": (_mamba, "keys to cluster|not used by the model"),
    "gemma3n (shared keys)": (_shared_keys, "keys of earlier layers"),
}
"""Models with layers that cannot be compressed: how to make one, and what the refusal must speak of."""
