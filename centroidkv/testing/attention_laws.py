"""Laws of attention over clusters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from centroidkv.testing import oracles
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.strategies import AttentionCase, attentions
from centroidkv.testing.tolerances import attention_bound

cases = attentions()


def _expect_close(got: Tensor, wanted: Tensor, bound: float) -> None:
    error = (got.double() - wanted.double()).abs().max() if got.numel() else 0.0
    expect(got.shape == wanted.shape, f"shape {tuple(wanted.shape)}", tuple(got.shape))
    expect(torch.isfinite(got).all() and error <= bound, f"{wanted.tolist()} to within {bound:.3g}", got.tolist())


def _bound(case: AttentionCase, query: Tensor, keys: Tensor, values: Tensor, degree: Tensor) -> float:
    return attention_bound(query, keys, values, degree, case.size**-0.5)


@law("the output is softmax(q.k / sqrt(d) + ln N) v, in the query's type", cases)
def equals_the_definition(attention: Any, case: AttentionCase) -> None:
    tensors = case.tensors()
    out = attention(*tensors, causal=case.causal)
    expect(out.dtype == tensors[0].dtype, f"{tensors[0].dtype}", out.dtype)
    _expect_close(out, oracles.attention(*tensors, case.size**-0.5, case.causal), _bound(case, *tensors))


@law("a slot of degree N acts as N slots of degree 1", cases)
def degree_counts_copies(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    degree = (degree[:1, :1] % 4 + 1).expand(degree.shape).contiguous()
    copies = degree[0, 0].long()
    many = [x.repeat_interleave(copies, 2) for x in (keys, values)]
    out = attention(query, keys, values, degree, causal=False)
    ones = torch.ones(*degree.shape[:2], int(copies.sum()))
    bound = _bound(case, query, many[0], many[1], degree)
    _expect_close(out, attention(query, *many, ones, causal=False), 2 * bound)


@law("a slot of degree 0 does not exist, whatever its key and value", cases)
def empty_slots_are_absent(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    degree = degree.clone()
    degree[..., 1::3] = 0
    keep = torch.arange(case.slots) % 3 != 1
    wild = keys.clone(), values.clone()
    for tensor in wild:
        tensor[:, :, ~keep] = 100.0
    fewer = attention(query, keys[:, :, keep], values[:, :, keep], degree[..., keep], causal=False)
    _expect_close(attention(query, *wild, degree, causal=False), fewer, 2 * _bound(case, query, keys, values, degree))


@law("the order of slots does not matter to a query that sees them all", cases)
def slots_are_a_set(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    order = torch.randperm(case.slots, generator=torch.Generator().manual_seed(case.seed))
    shuffled = (keys[:, :, order], values[:, :, order], degree[..., order])
    out = attention(query, keys, values, degree, causal=False)
    _expect_close(attention(query, *shuffled, causal=False), out, 2 * _bound(case, query, keys, values, degree))


@law("multiplying all degrees by one number changes nothing", cases)
def only_ratios_of_degrees_matter(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    out = attention(query, keys, values, degree, causal=case.causal)
    bound = _bound(case, query, keys, values, degree * 64)
    _expect_close(attention(query, keys, values, degree * 64, causal=case.causal), out, 2 * bound)


ATTENTION_LAWS = (
    equals_the_definition,
    degree_counts_copies,
    empty_slots_are_absent,
    slots_are_a_set,
    only_ratios_of_degrees_matter,
)


def check_attention(attention: Any, examples: int | None = None) -> None:
    """Check a function ``(query, keys, values, degree, *, causal) -> out`` against every law of attention.

    >>> from centroidkv.attention import degree_attention
    >>> check_attention(degree_attention, examples=5)
    """
    check_all(ATTENTION_LAWS, attention, examples)
