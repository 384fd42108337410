"""One forward pass over a context, shared by every method that compresses it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from analysis.reproduce.capture import recording
from centroidkv import KVState, presets
from centroidkv.allocation import depths_of
from centroidkv.cache import GrowingState
from centroidkv.integrations.rope import rotary_of
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.release import text_config
from centroidkv.rotary import Rotary

NEVER = 10**9
"""An interval that no tail reaches: what is measured is the compression of the context."""


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What methods may look at in one full-attention layer: ``keys, values [1, H, n, D]`` as cached, ``queries [1, Hq,
    n, D]`` after RoPE, and for kvpress the attention module with its inputs.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    module: Any
    hidden: Tensor
    position_embeddings: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Prefill:
    """A processed context: its compressible layers, and the cache as the model left it.

    ``depths``: where in the model these layers lie, (i + 1/2) / n for layer i of n.
    """

    layers: list[LayerInputs]
    depths: list[float]
    cache: DynamicCache
    rotary: Rotary
    length: int

    @property
    def bytes_full(self) -> int:
        """Bytes of keys and values of the compressible layers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)


@torch.no_grad()
def prefill(model: Any, context: Tensor) -> Prefill:
    """Process ``context [1, n]`` with full attention."""
    inputs: dict[int, tuple[Any, Tensor, tuple[Tensor, Tensor]]] = {}

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        inputs[module.layer_idx] = (module, hidden, kwargs["position_embeddings"])

    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "q_proj")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    cache = DynamicCache(config=model.config)
    try:
        with recording(model) as seen:
            model(context, past_key_values=cache, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    full = [index for index, stock in enumerate(cache.layers) if type(stock) is DynamicLayer]
    held = cache.layers
    layers = [LayerInputs(held[i].keys, held[i].values, seen[i].query, seen[i].scale, *inputs[i]) for i in full]
    depths = depths_of(full, len(held))
    return Prefill(layers, depths, cache, rotary_of(text_config(model.config)), context.shape[1])


def cache_of(model: Any, filled: Prefill, states: list[KVState]) -> CentroidCache:
    """A cache that goes on from ``states``, one per compressible layer; the other layers are as the model left them."""
    compressor = presets.streaming_llm(1.0)  # never asked: see NEVER
    cache = CentroidCache(compressor, interval=NEVER, config=model.config)
    queue = iter(states)
    layers: list[Any] = []
    for stock in filled.cache.layers:
        if type(stock) is DynamicLayer:
            growing = GrowingState(compressor, NEVER, filled.rotary)
            growing.restore(next(queue), filled.length)
            layers.append(CentroidLayer(growing))
        else:
            layers.append(copy.copy(stock))
    cache.layers = layers
    return cache


@torch.no_grad()
def read(model: Any, cache: CentroidCache, tail: Tensor) -> Tensor:
    """Logits ``[m, V]`` float32 over ``tail [1, m]``, read after what ``cache`` holds."""
    with enable(model):
        return model(tail, past_key_values=cache).logits[0].float()
