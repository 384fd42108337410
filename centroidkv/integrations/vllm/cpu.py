"""The back end on vLLM's CPU platform: prompts attend by vLLM's own kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from centroidkv.integrations.vllm.backend import CentroidBackend, CentroidImpl

BLOCK = 32
"""Slots per block of the copy that vLLM's kernel reads."""


def stock_causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention over a prompt as vLLM computes it; see :data:`~centroidkv.paged.attend.Prompts`.

    Its kernel wants keys and values interleaved for the processor's matrix unit. They are copied into that order, which
    costs little beside the attention: a prompt's queries are many.
    """
    (new, query_heads, size), (heads, slots, _) = query.shape, keys.shape
    count = -(-slots // BLOCK)
    isa = _get_attn_isa(query.dtype, BLOCK, size, "auto")
    # Zeros: the kernel reads to the end of the last block, and a weight of zero does not silence a NaN.
    key_cache, value_cache = keys.new_zeros(count, heads, 2 * BLOCK, size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), key_cache, value_cache,
        torch.arange(slots), isa,
    )  # fmt: skip
    starts, lengths = torch.tensor([0, new], dtype=torch.int32), torch.tensor([slots], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=query_heads, num_kv_heads=heads, head_dim=size, seq_lens=lengths, dtype=query.dtype,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=key_cache, value_cache=value_cache, output=out, query_start_loc=starts,
        seq_lens=lengths, scale=scale, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=torch.arange(count, dtype=torch.int32)[None], softcap=0, scheduler_metadata=schedule, s_aux=None,
    )  # fmt: skip
    return out


class CentroidCpuImpl(CentroidImpl):
    """Attention of one layer on the CPU."""

    prompts = staticmethod(stock_causal_attention)


class CentroidCpuBackend(CentroidBackend):
    """Attention over clusters on the CPU."""

    @staticmethod
    def get_name() -> str:
        return CPUAttentionBackend.get_name()

    @staticmethod
    def get_impl_cls() -> type[CentroidCpuImpl]:
        return CentroidCpuImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return CPUAttentionBackend.get_supported_head_sizes()
