"""Brute force in float64: slow, obvious, and independent of the package's own code."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from centroidkv.records import Assignment, Partition


def chunks_of(partition: Partition) -> list[tuple[list[int], list[int]]]:
    """(sources, targets) of every chunk, as plain lists."""
    return [
        (sources, targets)
        for block in partition.blocks
        for sources, targets in zip(block.sources.tolist(), block.targets.tolist(), strict=True)
    ]


def merged_mean(x: Tensor, degree: Tensor, assignment: Assignment) -> Tensor:
    """Degree-weighted cluster means of ``x [B, H, T, ...]`` in float64; NaN at slots that left."""
    out = torch.full(x.shape, math.nan, dtype=torch.float64)
    for b, h in itertools.product(*map(range, x.shape[:2])):
        joins = assignment.joins[b, h]
        kept = (joins >= 0).nonzero().flatten()
        weight, rows = degree[b, h].double(), x[b, h].double()
        total = torch.zeros_like(weight).index_add(0, joins[kept], weight[kept])
        wide = weight[kept].reshape(-1, *(1,) * (rows.ndim - 1))
        moment = torch.zeros_like(rows).index_add(0, joins[kept], wide * rows[kept])
        stays = (joins == torch.arange(len(joins))).nonzero().flatten()
        out[b, h, stays] = moment[stays] / total[stays].reshape(-1, *(1,) * (rows.ndim - 1))
    return out


def attention(query: Tensor, keys: Tensor, values: Tensor, degree: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(scale q.k + ln N) v, head by head, in float64; zeros where nothing is visible."""
    batch, query_heads, length, _ = query.shape
    heads, slots = keys.shape[1:3]
    out = torch.zeros(batch, query_heads, length, values.shape[-1], dtype=torch.float64)
    place = torch.arange(slots)
    for b, h in itertools.product(range(batch), range(query_heads)):
        kv = h // (query_heads // heads)
        visible = (degree[b, kv] > 0).expand(length, slots)
        if causal:
            visible = visible & (place <= slots - length + torch.arange(length)[:, None])
        logits = scale * query[b, h].double() @ keys[b, kv].double().T
        logits = torch.where(visible, logits, -torch.inf)
        top = logits.amax(-1, keepdim=True).clamp(min=-1e300)
        weights = torch.where(visible, (logits - top).exp(), 0.0) * degree[b, kv].double()
        total = weights.sum(-1, keepdim=True)
        live = torch.where(degree[b, kv][:, None] > 0, values[b, kv].double(), 0.0)
        out[b, h] = weights @ live / total.clamp(min=1e-300)
    return out


def best_equal_splits(similarity_by_distance: list[float]) -> tuple[float, list[tuple[int, ...]]]:
    """The greatest total cross similarity over all splits of a chunk into halves, and the splits that reach it.

    ``similarity_by_distance[d - 1]`` is the similarity of slots at distance d = 1..c-1. A split is given by its side
    of floor(c/2) slots. Exhaustive: C(c, c/2) splits.
    """
    length = len(similarity_by_distance) + 1
    sides = itertools.combinations(range(length), length // 2)
    totals = {side: cross_similarity(side, similarity_by_distance) for side in sides}
    best = max(totals.values())
    slack = 1e-9 * max(1.0, abs(best))
    return best, [side for side, total in totals.items() if total >= best - slack]


def cross_similarity(side: tuple[int, ...], similarity_by_distance: list[float]) -> float:
    """Sum of f(|i - j|) over i in ``side`` and j outside it."""
    length = len(similarity_by_distance) + 1
    others = [j for j in range(length) if j not in side]
    return math.fsum(similarity_by_distance[abs(i - j) - 1] for i in side for j in others)
