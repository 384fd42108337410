"""How differently two slots answer the queries to be expected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.gram import factorise
from centroidkv.queries import exact_moment
from centroidkv.ranges import largest_of, power_of_two
from centroidkv.state import KVState, accumulation_dtype


@dataclass(frozen=True)
class ExpectedLogits:
    """-(E (q.k_a - q.k_b)^2 + w |v_a - v_b|^2 / mean |v|^2): how far apart two slots' logits and values are.

    The expectation is over the queries that the state carries (:mod:`centroidkv.queries`), each averaged over the
    positions to come, so differences between keys that no query looks at, or that depend on where it stands, do not
    count. With M = (1 - ridge) E q q^T + ridge * m I, m the mean of the diagonal of E q q^T, and its Cholesky factor L,
    slots are compared as points [k L, sqrt(w) v / rms |v|] by squared distance: the matcher sees those instead of keys.

    Args:
        values: w, the weight of the values.
        ridge: share of an isotropic query distribution: what keeps queries unlike those seen so far in play.
    """

    values: float = 1.0
    ridge: float = 0.1

    formula: ClassVar[str] = "expected logits"
    needs_queries = True

    def __post_init__(self) -> None:
        if not self.values >= 0 or not 0 < self.ridge <= 1:
            raise StageError(f"ExpectedLogits takes values >= 0 and a ridge in (0, 1], got {self!r}")

    def prepare(self, state: KVState, free: Tensor) -> KVState:
        """Add the Cholesky factor and the values' scale, once per compression."""
        dtype, tiny = _exact(state), torch.finfo(torch.float32).tiny
        moment = exact_moment(state, self)
        level = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        factor = factorise((1 - self.ridge) * moment, ridge=0.0, least=self.ridge * level).lower
        values, dims = state.values.to(dtype), (-2, -1)
        unit = power_of_two(largest_of(values, dims))
        power = ((values * unit).square().sum(-1) * state.degree).sum(-1) / state.degree.sum(-1).clamp(min=1)
        scale = (self.values / power.clamp(min=tiny)).sqrt().to(dtype)
        # Points so long that their squares would leave the type are all made shorter, by a power of two per head: which
        # pairs are closest does not depend on it, and ordinary points keep their bits.
        rooted = factor.square().sum(dims, keepdim=True).sqrt()
        longest = torch.maximum(
            largest_of(state.keys, dims).double() * rooted * state.keys.shape[-1] ** 0.5,
            scale.double()[..., None, None] * largest_of(values * unit, dims),
        )
        shrink = torch.where((longest > 2.0**40) | (longest < 2.0**-40), power_of_two(longest), 1.0)
        limits = torch.finfo(dtype)
        factor = (factor * shrink).clamp(-limits.max / 4, limits.max / 4).to(dtype)
        scale = (scale.double() * unit[..., 0, 0] * shrink[..., 0, 0]).clamp(max=limits.max / 4).to(dtype)
        return replace(state, head_data={**state.head_data, "logit_factor": factor, "value_scale": scale})

    def features(self, state: KVState) -> Tensor:
        """The points ``[B, H, T, D + Dv]`` that stand for the slots."""
        dtype = _exact(state)
        keys = state.keys.to(dtype) @ state.head_data["logit_factor"].to(dtype)
        values = state.values.to(dtype) * state.head_data["value_scale"].to(dtype)[..., None, None]
        return torch.cat((keys, values), -1)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        # |a|^2 + |b|^2 - 2 a.b, clipped where it cancels below zero.
        square = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * a @ b.mT
        return -square.clamp(min=0)


def _exact(state: KVState) -> torch.dtype:
    """The type points are computed in: float64 if keys or values are."""
    return torch.promote_types(accumulation_dtype(state.keys.dtype), accumulation_dtype(state.values.dtype))
