"""How differently two slots answer the queries to be expected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.queries import mean_moment
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
        moment = mean_moment(state, self)
        size = moment.shape[-1]
        level = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(size, dtype=moment.dtype, device=moment.device)
        tiny = torch.finfo(torch.float32).tiny
        factor = torch.linalg.cholesky((1 - self.ridge) * moment + (self.ridge * level + tiny) * eye)
        values = state.values.to(moment.dtype)
        power = (values.square().sum(-1) * state.degree).sum(-1) / state.degree.sum(-1).clamp(min=1)
        scale = (self.values / power.clamp(min=tiny)).sqrt()
        return replace(state, head_data={**state.head_data, "logit_factor": factor, "value_scale": scale})

    def features(self, state: KVState) -> Tensor:
        """The points ``[B, H, T, D + Dv]`` that stand for the slots."""
        dtype = accumulation_dtype(state.keys.dtype)
        keys = state.keys.to(dtype) @ state.head_data["logit_factor"].to(dtype)
        values = state.values.to(dtype) * state.head_data["value_scale"].to(dtype)[..., None, None]
        return torch.cat((keys, values), -1)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        # |a|^2 + |b|^2 - 2 a.b, clipped where it cancels below zero.
        square = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * a @ b.mT
        return -square.clamp(min=0)
