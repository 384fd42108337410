"""A decoder run by hand: layer by layer, explicit positions, reference attention, no cache, mask or attention function.

The definition that the integration must equal. Only a model's linear maps, norms and MLPs are its own.
"""

from __future__ import annotations

from typing import Any

import torch
from matrix_models import WINDOW, Family
from torch import Tensor

from centroidkv.attention import degree_attention
from centroidkv.cache import GrowingState
from centroidkv.rotary import Rotary


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE of ``x [1, H, L, D]`` at ``positions [L]``, channel i paired with i + D / 2."""
    size = x.shape[-1]
    inv_freq = 1.0 / (theta ** (torch.arange(0, size, 2).float() / size))
    angle = torch.cat((positions[:, None] * inv_freq,) * 2, -1)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()


class Window:
    """A sliding window by hand: all keys are kept, and what lies outside is masked."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.keys, self.values = (
            (k, v) if self.keys is None else (torch.cat((self.keys, k), 2), torch.cat((self.values, v), 2))
        )
        groups, slots = q.shape[1] // k.shape[1], self.keys.shape[2]
        keys, values = (x.repeat_interleave(groups, 1) for x in (self.keys, self.values))
        row, column = torch.arange(slots - q.shape[2], slots)[:, None], torch.arange(slots)
        hidden = (column > row) | (row - column >= WINDOW)
        return (scale * q @ keys.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ values

    def crop(self, tokens: int) -> None:
        if tokens:
            self.keys, self.values = self.keys[:, :, :-tokens], self.values[:, :, :-tokens]


class Clusters:
    """A compressed layer by hand."""

    def __init__(self, growing: GrowingState) -> None:
        self.growing = growing

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values, degree = self.growing.append(k, v, queries=q * scale)
        degree = torch.ones(keys.shape[:3]) if degree is None else degree
        return degree_attention(q, keys, values, degree, scale=scale, backend="reference")

    def crop(self, tokens: int) -> None:
        self.growing.crop(tokens)


class ByHand:
    """Batch 1; :meth:`feed` takes token ids ``[L]`` and gives logits ``[L, vocabulary]``."""

    def __init__(self, model: Any, family: Family, compressor: Any, interval: int, waits: bool = False) -> None:
        self.model, self.family, self.position = model, family, 0
        attention = model.model.layers[0].self_attn
        rotary = Rotary.from_theta(family.theta, attention.head_dim)
        self.layers = [
            Clusters(GrowingState(compressor, interval, rotary)) if kind == "full" else Window()
            for kind in family.kinds
        ]
        for layer in self.layers:
            if waits and isinstance(layer, Clusters):
                layer.growing.waits = True

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        inner = self.model.model
        hidden = inner.embed_tokens(ids[None])
        positions = torch.arange(self.position, self.position + len(ids)).float()
        self.position += len(ids)
        for block, layer, kind in zip(inner.layers, self.layers, self.family.kinds, strict=True):
            theta = self.family.theta if kind == "full" else 1e4
            mixed = self._attention(block.self_attn, block.input_layernorm(hidden), layer, positions, theta)
            if self.family.name == "Gemma3":
                hidden = hidden + block.post_attention_layernorm(mixed)
                fed = block.mlp(block.pre_feedforward_layernorm(hidden))
                hidden = hidden + block.post_feedforward_layernorm(fed)
            else:
                hidden = hidden + mixed
                hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self.model.lm_head(inner.norm(hidden))[0]

    def _attention(self, attention: Any, x: Tensor, layer: Any, positions: Tensor, theta: float) -> Tensor:
        heads, size = self.model.config.num_attention_heads, attention.head_dim
        kv_heads = self.model.config.num_key_value_heads
        if self.family.name == "Phi3":
            q, k, v = attention.qkv_proj(x).split([heads * size, kv_heads * size, kv_heads * size], -1)
        else:
            q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
        q, k, v = (y.view(1, x.shape[1], -1, size) for y in (q, k, v))
        if self.family.name in ("Qwen3", "Gemma3"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = rotate(q, positions, theta), rotate(k, positions, theta)
        mixed = layer.attend(q, k, v, size**-0.5)
        return attention.o_proj(mixed.transpose(1, 2).flatten(2))

    def crop(self, tokens: int) -> None:
        self.position -= tokens
        for layer in self.layers:
            layer.crop(tokens)

    def follow(self, chunks: list[Tensor], text: Tensor) -> Tensor:
        """Feed ``chunks``, then the tokens of ``text`` one by one but the last; the logits that predict ``text``."""
        logits = [self.feed(chunk)[-1] for chunk in chunks][-1:]
        logits += [self.feed(token[None])[-1] for token in text[:-1]]
        return torch.stack(logits)
