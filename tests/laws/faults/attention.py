"""Planted faults of attention: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import torch

from centroidkv.attention import degree_attention
from centroidkv.testing import attention_laws


def attend(change):
    def run(query, keys, values, degree, *, causal=True):
        return change(query, keys, values, degree, causal)

    return run


def base(q, k, v, n, causal):
    return degree_attention(q, k, v, n, causal=causal, backend="reference")


def up_to(most):
    """Slots past a tile are not seen."""
    return attend(lambda q, k, v, n, c: base(q, k, v, n * (torch.arange(n.shape[-1]) < most), c))


def channels(most):
    def change(q, k, v, n, c):
        scale = (q.shape[-1] / min(q.shape[-1], most)) ** -0.5
        return base(q[..., :most] * scale, k[..., :most], v, n, c)

    return attend(change)


def queries_of_a_tile(q, k, v, n, c):
    """Queries from the 65th on see what the 64th sees."""
    out = base(q, k, v, n, c)
    return out[:, :, torch.arange(out.shape[2]).clamp(max=63)]


def mean_of_heads(q, k, v, n, c):
    return base(q, k, (v + v.mean(1, keepdim=True)) / 2, n, c)


def rows_past_64(q, k, v, n, c):
    index = torch.arange(q.shape[0]).clamp(max=63)
    return base(q, k[index], v[index], n[index], c)


class Buffered:
    """Values of the first call of a shape, kept."""

    def __init__(self):
        self.values = {}

    def __call__(self, query, keys, values, degree, *, causal=True):
        return base(query, keys, self.values.setdefault(values.shape, values), degree, causal)


def scaled_in_place(q, k, v, n, c):
    q.mul_(q.shape[-1] ** -0.5)
    return base(q * q.shape[-1] ** 0.5, k, v, n, c)


ATTENTION = {
    attention_laws.remembers_nothing: {
        "a buffer that is not filled again": Buffered(),
        "scales the queries in place": attend(scaled_in_place),
    },
    attention_laws.rows_and_heads_attend_alone: {
        "values averaged over heads": attend(mean_of_heads),
        "rows past the 64th read its keys": attend(rows_past_64),
    },
    attention_laws.equals_the_definition: {
        "bias forgotten": attend(lambda q, k, v, n, c: base(q, k, v, (n > 0).float(), c)),
        "bias sign wrong": attend(lambda q, k, v, n, c: base(q, k, v, torch.where(n > 0, 1 / n, 0.0), c)),
        "scale forgotten": attend(lambda q, k, v, n, c: base(q * q.shape[-1] ** 0.5, k, v, n, c)),
        "heads interleaved": attend(lambda q, k, v, n, c: base(q.flip(1), k, v, n, c)),
        "at most 256 slots": up_to(256),
        "at most 2048 slots": up_to(2048),
        "at most 256 channels": channels(256),
        "a tile of 64 queries left in": attend(queries_of_a_tile),
        "degrees in float16": attend(lambda q, k, v, n, c: base(q, k, v, n.clamp(max=65504).half().float(), c)),
        "at most 256 value channels": attend(lambda q, k, v, n, c: base(q, k, v * (torch.arange(v.shape[-1]) < 256), n, c)),
        "causal off by one": attend(lambda q, k, v, n, c: base(q, k, v, n, False)),
    },
    attention_laws.degree_counts_copies: {
        "bias forgotten": attend(lambda q, k, v, n, c: base(q, k, v, (n > 0).float(), c)),
        "square root of the degree": attend(lambda q, k, v, n, c: base(q, k, v, n.sqrt(), c)),
    },
    attention_laws.empty_slots_are_absent: {
        "log of degree plus one": attend(lambda q, k, v, n, c: base(q, k, v, n + 1, c)),
        "empty slots clamped to one": attend(lambda q, k, v, n, c: base(q, k, v, n.clamp(min=1), c)),
    },
    attention_laws.slots_are_a_set: {
        "the last slot counts double": attend(lambda q, k, v, n, c: base(q, k, v, torch.cat((n[..., :-1], n[..., -1:] * 2), -1), c)),
        "recency bias": attend(lambda q, k, v, n, c: base(q, k, v, n * (1 + torch.arange(n.shape[-1])), c)),
    },
    attention_laws.only_ratios_of_degrees_matter: {
        "degree plus one": attend(lambda q, k, v, n, c: base(q, k, v, torch.where(n > 0, n + 1, n), c)),
        "degree clamped": attend(lambda q, k, v, n, c: base(q, k, v, n.clamp(max=64), c)),
    },
}  # fmt: skip
