"""Best targets inside chunks, for the pairs of similarity and matcher that have a fast path. Not stages themselves.

A scorer looks at the same m chunks of c slots of R heads, sources at the even places and targets at the odd ones, and
says for every source how well its best target scores and which target that is. It equals the stages it is named after,
computed with fewer passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from centroidkv.state import KVState, accumulation_dtype

SAFE = 2.0**60
"""Norms within [1 / SAFE, SAFE] can be squared and multiplied in float32 without leaving its range."""


class Scorer(Protocol):
    """Best targets for a group of heads."""

    def note(self, keys: Tensor) -> Tensor:
        """A number per slot ``[n]`` that depends on its key alone, kept until the slot merges. keys ``[n, D]``."""
        ...

    def __call__(self, keys: Tensor, values: Tensor, weight: Tensor, noted: Tensor) -> tuple[Tensor, Tensor]:
        """``[R, m, c, D], [R, m, c, Dv], [R, m, c] x 2`` -> score ``[R, m, sources]``, place among the targets."""
        ...


class CosineOfKeys:
    """max_b cos(k_a, k_b): the targets are divided by their norms, the best products by those of the sources.

    Args:
        step: what similarities are rounded to multiples of, before the best is looked for; None: they are not.
    """

    def __init__(self, step: float | None = None) -> None:
        self.safe, self.step = True, step

    def note(self, keys: Tensor) -> Tensor:
        """1 / |k|, or 0 where that is 0."""
        norm = torch.linalg.vector_norm(keys, dim=-1)
        if self.safe and len(norm):
            least, most = (x.item() for x in norm.aminmax())
            if least > 1 / SAFE and most < SAFE:
                return norm.reciprocal_()
            # Norms that cannot be squared are taken again, block by block, from keys brought to a size that can. A key
            # of zeros is none of them; a tiny key whose squares vanish is.
            zero = norm == 0
            self.safe = bool(most < SAFE and norm.masked_fill(zero, 1).amin() > 1 / SAFE and not keys[zero].any())
        return norm.reciprocal_().masked_fill_(norm.isinf(), 0) if self.safe else norm

    def __call__(self, keys: Tensor, values: Tensor, weight: Tensor, noted: Tensor) -> tuple[Tensor, Tensor]:
        if not self.safe:
            tiny = torch.finfo(keys.dtype).tiny
            keys = keys / keys.abs().amax(-1, keepdim=True).clamp(min=tiny)
            noted = 1 / torch.linalg.vector_norm(keys, dim=-1)
            noted = noted.masked_fill(noted.isinf(), 0)
        products = _products(keys[..., 0::2, :], keys[..., 1::2, :] * noted[..., 1::2, None])
        if self.step is None:
            score, target = products.max(-1)
            return score.mul_(noted[..., 0::2]), target
        score, target = products.mul_(noted[..., 0::2, None] / self.step).round_().max(-1)
        return score.mul_(self.step), target


class WardOnLogits:
    """max_b -(w_a w_b / (w_a + w_b)) |x_a - x_b|^2 with x = [k L, s v]: WardMatching over ExpectedLogits.

    Args:
        factor: L of each head, ``[R, D, D]``.
        scale: s of each head, ``[R]``.
    """

    def __init__(self, factor: Tensor, scale: Tensor) -> None:
        self.factor, self.scale = factor[:, None], scale[:, None, None, None]

    def note(self, keys: Tensor) -> Tensor:
        """Nothing."""
        return keys[:, 0]

    def __call__(self, keys: Tensor, values: Tensor, weight: Tensor, noted: Tensor) -> tuple[Tensor, Tensor]:
        points = torch.cat((keys @ self.factor, values * self.scale), -1)
        square, weight = points.square().sum(-1), weight.to(points.dtype)
        a, b = weight[..., 0::2, None], weight[..., None, 1::2]
        pairs = _products(points[..., 0::2, :], points[..., 1::2, :]).mul_(-2)
        pairs.add_(square[..., 0::2, None]).add_(square[..., None, 1::2]).clamp_(min=0)
        share = (a + b).clamp_(min=torch.finfo(torch.float32).tiny).reciprocal_().mul_(a).mul_(b)
        return pairs.mul_(share).neg_().max(-1)


def _products(sources: Tensor, targets: Tensor) -> Tensor:
    """Source times target, [R, m, sources, targets]; as one batch, which the strided halves allow without a copy."""
    return torch.bmm(sources.flatten(0, 1), targets.flatten(0, 1).mT).unflatten(0, sources.shape[:2])


def _cosine(similarity: Any, state: KVState, group: slice) -> Scorer:
    return CosineOfKeys(similarity.step)


def _ward_on_logits(similarity: Any, state: KVState, group: slice) -> Scorer:
    dtype = torch.promote_types(accumulation_dtype(state.keys.dtype), accumulation_dtype(state.values.dtype))
    factor, scale = (state.head_data[name].flatten(0, 1)[group].to(dtype) for name in ("logit_factor", "value_scale"))
    return WardOnLogits(factor, scale)


SCORERS: dict[tuple[Any, Any], Callable[[Any, KVState, slice], Scorer]] = {
    ("cosine", "soft"): _cosine,
    ("expected logits", "ward"): _ward_on_logits,
}
"""By the ``formula`` that a similarity and a matcher declare: the scorer of a group of heads (rows times heads), made
from the similarity."""
