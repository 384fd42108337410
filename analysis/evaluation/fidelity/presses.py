"""kvpress's query-agnostic presses, called layer by layer on a shared prefill.

kvpress needs its own environment (transformers < 5.3): ``make peers`` makes one. Left out, because they cannot be put
beside the others at equal physical bytes or without more than the context: AdaKV, CriticalAdaKV, KVzip and its kin mask
keys instead of removing them; SimLayerKV takes a threshold, not a ratio; ThinK removes channels;
DuoAttention, QFilter, KVzap, LU-KV, FastKVzip and ExpectedAttentionWithStats need trained weights or statistics from a
hub; ObservedAttention and KVCompose need all attention weights; Finch and CAM need the question or decoding.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from analysis.evaluation.fidelity.prefill import LayerInputs, Prefill
from centroidkv import KVState
from centroidkv.integrations.transformers.release import text_config

AVAILABLE = importlib.util.find_spec("kvpress") is not None


def makers() -> dict[str, Callable[[float], Any]]:
    """Every press by name, as a function of the share of slots to remove; empty without kvpress."""
    if not AVAILABLE:
        return {}
    import kvpress

    plain = {
        "Random": kvpress.RandomPress,
        "Knorm": kvpress.KnormPress,
        "KeyDiff": kvpress.KeyDiffPress,
        "LeverageScore": kvpress.LeverageScorePress,
        "NonCausalAttn": kvpress.NonCausalAttnPress,
        "Compactor": kvpress.CompactorPress,
        "ExpectedAttention": kvpress.ExpectedAttentionPress,
        "SnapKV": kvpress.SnapKVPress,
        "PyramidKV": kvpress.PyramidKVPress,  # layers of different lengths, the bytes of all together are the same
        "TOVA": kvpress.TOVAPress,
        "StreamingLLM": kvpress.StreamingLLMPress,
        "LagKV": kvpress.LagKVPress,
        "CUR": kvpress.CURPress,
        "CapKV": kvpress.CapPress,
    }
    wrapped = {
        "ChunkKV(SnapKV)": lambda ratio: kvpress.ChunkKVPress(kvpress.SnapKVPress(ratio)),
        "Merging(KeyDiff)": lambda ratio: kvpress.MergingPress(kvpress.KeyDiffPress(ratio)),
        "Merging(ExpectedAttention)": lambda ratio: kvpress.MergingPress(kvpress.ExpectedAttentionPress(ratio)),
    }
    return {**{name: functools.partial(_plain, press) for name, press in plain.items()}, **wrapped}


def _plain(press: Callable[..., Any], ratio: float) -> Any:
    return press(compression_ratio=ratio)


def press_states(model: Any, press: Any, filled: Prefill, seed: int = 0) -> list[KVState]:
    """What ``press`` leaves of every compressible layer. Presses that sketch at random start from ``seed``."""
    torch.manual_seed(seed)
    return [_one_layer(model, press, layer, filled.length) for layer in filled.layers]


def _one_layer(model: Any, press: Any, layer: LayerInputs, length: int) -> KVState:
    module = layer.module
    rotary = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        rotary = functools.partial(rotary, layer_type=text_config(model.config).layer_types[module.layer_idx])
    # kvpress gives modules their rotary embedding in the same way while it is active.
    object.__setattr__(module, "rotary_emb", rotary)
    try:
        keys, values = press.compress(
            module, layer.hidden, layer.keys, layer.values, None, {"position_embeddings": layer.position_embeddings}
        )
    finally:
        object.__delattr__(module, "rotary_emb")
    # Order does not matter to attention and presses leave theirs unsorted; the numbers only have to ascend.
    return replace(KVState.from_kv(keys, values), seen=torch.tensor([length]))
