"""Best targets inside chunks, for the pairs of similarity and matcher that have a fast path. Not stages themselves.

A scorer looks at the same m chunks of c slots of R heads, sources at the even places and targets at the odd ones, and
says for every source how well its best target scores and which target that is. It equals the stages it is named after,
computed with fewer passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from centroidkv.state import KVState, accumulation_dtype

Scorer = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""keys [R, m, c, D], values [R, m, c, Dv], weight [R, m, c] -> score [R, m, sources], place among the targets, same."""

SAFE = 2.0**60
"""Norms within [1 / SAFE, SAFE] can be squared and multiplied in float32 without leaving its range."""


def cosine(keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """max_b cos(k_a, k_b): the norms are divided out of the products instead of out of the keys."""
    norm = torch.linalg.vector_norm(keys, dim=-1)
    if not bool(((norm < SAFE) & ((norm > 1 / SAFE) | (norm == 0))).all()):
        tiny = torch.finfo(keys.dtype).tiny
        keys = keys / keys.abs().amax(-1, keepdim=True).clamp(min=tiny)
        norm = torch.linalg.vector_norm(keys, dim=-1)
    inverse = torch.where(norm > 0, 1 / norm, 0)
    score, target = _products(keys).mul_(inverse[..., None, 1::2]).max(-1)
    return score.mul_(inverse[..., 0::2]), target


class WardOnLogits:
    """max_b -(w_a w_b / (w_a + w_b)) |x_a - x_b|^2 with x = [k L, s v]: WardMatching over ExpectedLogits.

    Args:
        factor: L of each head, ``[R, D, D]``.
        scale: s of each head, ``[R]``.
    """

    def __init__(self, factor: Tensor, scale: Tensor) -> None:
        self.factor, self.scale = factor[:, None], scale[:, None, None, None]

    def __call__(self, keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        points = torch.cat((keys @ self.factor, values * self.scale), -1)
        square, weight = points.square().sum(-1), weight.to(points.dtype)
        a, b = weight[..., 0::2, None], weight[..., None, 1::2]
        pairs = _products(points).mul_(-2)
        pairs.add_(square[..., 0::2, None]).add_(square[..., None, 1::2]).clamp_(min=0)
        share = (a + b).clamp_(min=torch.finfo(torch.float32).tiny).reciprocal_().mul_(a).mul_(b)
        return pairs.mul_(share).neg_().max(-1)


def _products(points: Tensor) -> Tensor:
    """Source times target, [R, m, sources, targets]; as one batch, which the strided halves allow without a copy."""
    batch = points.flatten(0, 1)
    return torch.bmm(batch[:, 0::2], batch[:, 1::2].mT).unflatten(0, points.shape[:2])


def _cosine(state: KVState, group: slice) -> Scorer:
    return cosine


def _ward_on_logits(state: KVState, group: slice) -> Scorer:
    dtype = accumulation_dtype(state.keys.dtype)
    factor, scale = (state.head_data[name].flatten(0, 1)[group].to(dtype) for name in ("logit_factor", "value_scale"))
    return WardOnLogits(factor, scale)


SCORERS: dict[tuple[Any, Any], Callable[[KVState, slice], Scorer]] = {
    ("cosine", "soft"): _cosine,
    ("expected logits", "ward"): _ward_on_logits,
}
"""By the ``formula`` that a similarity and a matcher declare: the scorer of a group of heads (rows times heads)."""
