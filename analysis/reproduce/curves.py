"""Similarity of keys by distance: measured curves, and whether they fall and are convex."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from analysis.reproduce.capture import capture
from centroidkv.cli.picture import key_cosines, similarity_by_distance
from centroidkv.errors import EvaluationError
from centroidkv.integrations.rope import rotary_of


@dataclass(frozen=True)
class Keys:
    """Keys of one text, ``[layers, H, T, D]``, before and after RoPE, and which of the model's layers they are of."""

    layers: tuple[int, ...]
    before: Tensor
    after: Tensor


def full_layers(config: Any) -> tuple[int, ...]:
    """The layers that attend to everything: those the cache compresses. Sliding windows see no long distances."""
    return tuple(i for i, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer)


def keys_of(model: Any, ids: Tensor) -> Keys:
    """The keys of all full-attention layers for ``ids [1, T]``; before RoPE means turned back by their positions."""
    config = model.config.get_text_config()
    layers = full_layers(config)
    captured = capture(model.base_model, ids)  # logits are not needed, and with a large vocabulary most of the work
    after = torch.stack([captured[i].keys[0] for i in layers])
    positions = torch.arange(after.shape[2]).expand(after.shape[:3])
    return Keys(layers, rotary_of(config).unrotate(after, positions), after)


def curves(keys: Iterable[Tensor], longest: int) -> Tensor:
    """Mean cosine at distances 1, ..., ``longest``, ``[layers, H, longest]``, of each layer's keys ``[H, T, D]``.

    Raises:
        EvaluationError: the text is too short for that distance.
    """
    found = []
    for layer in keys:
        if layer.shape[1] <= longest:
            raise EvaluationError(f"distances up to {longest} need a longer text than {layer.shape[1]} tokens")
        found.append(similarity_by_distance(key_cosines(layer), longest))
    return torch.stack(found)


def is_monotone(curve: list[float]) -> bool:
    """Whether it never rises."""
    return all(a >= b for a, b in pairwise(curve))


def is_convex(curve: list[float]) -> bool:
    """Whether its drops never grow."""
    return all(a - 2 * b + c >= 0 for a, b, c in zip(curve, curve[1:], curve[2:], strict=False))


def rises(curve: Tensor) -> Tensor:
    """Where f(d+1) > f(d): ``[..., n-1]``, first for d = 1."""
    return curve[..., 1:] > curve[..., :-1]


def bends_down(curve: Tensor) -> Tensor:
    """Where f(d) - 2 f(d+1) + f(d+2) < 0, so that it is not convex there: ``[..., n-2]``, first for d = 1."""
    return curve[..., :-2] - 2 * curve[..., 1:-1] + curve[..., 2:] < 0


def octaves(curve: Tensor) -> tuple[Tensor, Tensor]:
    """Mean distance and mean similarity over d = 1, 2..3, 4..7, ...: ``[m]`` and ``[..., m]``; whole octaves only."""
    distance = torch.arange(1, curve.shape[-1] + 1, dtype=torch.float32)
    spans = [slice(2**k - 1, 2 ** (k + 1) - 1) for k in range((curve.shape[-1] + 1).bit_length() - 1)]
    return (
        torch.stack([distance[span].mean() for span in spans]),
        torch.stack([curve[..., span].mean(-1) for span in spans], -1),
    )


def shape_shares(curve: Tensor) -> tuple[float, float, float]:
    """The share of curves ``[..., n]`` that never rise, that are convex, and both; point by point."""
    return _shares(~rises(curve).any(-1), ~bends_down(curve).any(-1))


def octave_shares(curve: Tensor) -> tuple[float, float, float]:
    """The same for the means over octaves: the shape at large, without the noise between neighbouring distances."""
    distance, mean = octaves(curve)
    slope = mean.diff(dim=-1) / distance.diff()
    return _shares((slope <= 0).all(-1), (slope.diff(dim=-1) >= 0).all(-1))


def _shares(monotone: Tensor, convex: Tensor) -> tuple[float, float, float]:
    return tuple(x.float().mean().item() for x in (monotone, convex, monotone & convex))  # type: ignore[return-value]
