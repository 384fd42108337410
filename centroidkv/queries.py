"""What keys will be asked: a sample of a model's own queries, moved to just after the tokens seen.

Stages find the sample in ``state.head_data["queries"]``: ``[B, H, Q, D]``, before RoPE, of all query heads that share a
KV head, times the model's attention scale, so that q.k is a logit. CentroidCache collects it; whoever builds a state by
hand uses :func:`sample_queries`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from centroidkv.errors import RotaryError, ShapeError, StageError
from centroidkv.gram import gram
from centroidkv.ranges import largest_of, power_of_two, require_finite
from centroidkv.rotary import Rotary
from centroidkv.state import KVState, accumulation_dtype

__all__ = [
    "QUERIES",
    "expected_attention",
    "sample_queries",
]

QUERIES = "queries"
SAMPLE = 512
"""Query positions that stand for all: on three texts 256 gave a fifth more divergence on prose than 750 did."""
HORIZON = 512
"""Tokens ahead over which queries are averaged for what all of them agree on."""
AHEAD = 64
"""Tokens ahead at which single queries are asked for their attention."""
BLOCK = 2**21
"""Logits that are held at once, about: few enough to stay in a processor's cache."""


def evenly(count: int, sample: int = SAMPLE) -> Tensor:
    """``sample`` indices spread evenly over 0..count-1; each is taken several times if there are fewer.

    >>> evenly(8, 4).tolist(), evenly(2, 4).tolist()
    ([0, 2, 4, 6], [0, 0, 1, 1])
    """
    return torch.arange(sample, device="cpu") * count // sample


def sample_queries(queries: Tensor, heads: int, sample: int = SAMPLE) -> Tensor:
    """``[B, H, G * sample, D]`` for ``head_data["queries"]`` from all ``queries [B, H * G, L, D]``.

    Args:
        queries: before RoPE, times the attention scale.
        heads: H, the number of KV heads; consecutive query heads share one, as in all grouped-query models.
        sample: positions to keep, spread evenly over L.
    """
    if queries.ndim != 4 or queries.shape[1] % heads or not queries.shape[2]:
        raise ShapeError(
            f"queries must be [B, Hq, L, D] with Hq a multiple of the {heads} KV heads and L >= 1, got "
            f"{tuple(queries.shape)}"
        )
    batch, all_heads, length, size = queries.shape
    chosen = queries[:, :, evenly(length, sample).to(queries.device)]
    return chosen.reshape(batch, heads, all_heads // heads * sample, size)


def queries_of(state: KVState, asked_by: object) -> tuple[Tensor, Rotary]:
    """The sample ``[B, H, Q, D]`` before RoPE, and how to rotate it.

    Raises:
        StageError: the state carries no queries; names the stage that asked.
        NonFiniteError: they hold NaN or infinity.
        RotaryError: it does not say how keys are rotated.
    """
    queries = state.head_data.get(QUERIES)
    if queries is None:
        raise StageError(
            f"{asked_by!r} weighs slots by the queries that will ask for them and finds none: set "
            "head_data={'queries': sample_queries(...)} (centroidkv.queries), use CentroidCache, which collects them, "
            "or choose a compressor that needs none, such as presets.distinctive"
        )
    if queries.shape[-1] != state.keys.shape[-1]:
        raise ShapeError(f"queries have {queries.shape[-1]} channels, keys {state.keys.shape[-1]}; they must agree")
    if state.rotary is None:
        raise RotaryError(
            f"{asked_by!r} moves queries to later positions and needs to know how keys are rotated: pass "
            "KVState.from_kv(..., rotary=Rotary.from_theta(theta, dim))"
        )
    require_finite(queries, f"{asked_by!r} looks at the model's queries, and they hold NaN or infinity; look upstream")
    return queries.to(accumulation_dtype(state.keys.dtype)), state.rotary


def mean_moment(state: KVState, asked_by: object) -> Tensor:
    """E q q^T over the sample, ``[B, H, D, D]``, with each query averaged over its next HORIZON positions."""
    return exact_moment(state, asked_by).to(accumulation_dtype(state.keys.dtype))


def exact_moment(state: KVState, asked_by: object) -> Tensor:
    """:func:`mean_moment` in float64, summed so that it can be factorised whatever its rank (:mod:`centroidkv.gram`).

    Raises:
        NonFiniteError: queries so long that their squares leave float64.
    """
    queries, rotary = queries_of(state, asked_by)
    ahead = rotary.rotate_ahead(queries, state.seen, HORIZON).to(queries.dtype)
    return require_finite(
        gram(ahead) / max(queries.shape[2], 1),
        f"{asked_by!r} takes products of the model's queries, and they leave float64; look for an overflow upstream",
    )


def expected_attention(state: KVState, asked_by: object) -> Tensor:
    """The attention each slot will receive, ``[B, H, T]``: mean over the sample of softmax(q.k + ln N).

    Queries are moved to AHEAD tokens after those seen. A row's entries add up to 1. O(T Q D). Logits beyond the type's
    range count as its largest number, so that what is finite comes out finite.
    """
    queries, rotary = queries_of(state, asked_by)
    positions = (state.seen[:, None, None] + AHEAD).expand(queries.shape[:3])
    moved = rotary.rotate(queries, positions).to(queries.dtype)
    keys, mass = state.keys.to(queries.dtype), state.degree.log().to(queries.dtype)[:, :, None]
    logits = _logits(keys, float(largest_of(moved, (0, 1, 2, 3))) if moved.numel() else 0.0)
    total = torch.zeros_like(mass)
    # In blocks, because all logits at once would be larger than the cache itself.
    for block in moved.split(max(BLOCK // max(state.degree.numel(), 1), 1), 2):
        total += (logits(block) + mass).softmax(-1).sum(2, keepdim=True)
    return (total / max(queries.shape[2], 1))[:, :, 0].float()


def _logits(keys: Tensor, longest: float) -> Callable[[Tensor], Tensor]:
    """A function of queries ``[B, H, Q, D]`` without numbers beyond ``longest``: q.k for all ``keys [B, H, T, D]``."""
    most = torch.finfo(keys.dtype).max
    if longest * float(largest_of(keys, (0, 1, 2, 3))) * keys.shape[-1] < most / 4:
        return lambda queries: queries @ keys.mT
    # Both brought to a size whose products stay finite; what then leaves float64 is held at a quarter of its range.
    near = power_of_two(largest_of(keys, (-2, -1)).double())
    keys, limit = keys.double() * near, torch.finfo(torch.float64).max / 4

    def scaled(queries: Tensor) -> Tensor:
        far = power_of_two(largest_of(queries, (-2, -1)).double())
        return ((queries.double() * far) @ keys.mT / near / far).clamp(-limit, limit)

    return scaled
