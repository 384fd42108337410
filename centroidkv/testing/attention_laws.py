"""Laws of attention over clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.testing import oracles
from centroidkv.testing.law import check_all, expect, expect_same, law
from centroidkv.testing.memory import expect_inputs_unchanged, expect_no_memory
from centroidkv.testing.strategies import BEYOND_ATTENTIONS, AttentionCase, attentions
from centroidkv.testing.tolerances import attention_bound

cases = attentions()


def _expect_close(got: Tensor, wanted: Tensor, bound: float) -> None:
    expect_same(got, wanted, f"outputs to within {bound:.3g}", bound)
    expect(torch.isfinite(got).all(), "finite outputs", got)


def _bound(case: AttentionCase, query: Tensor, keys: Tensor, values: Tensor, degree: Tensor) -> float:
    return attention_bound(query, keys, values, degree, case.size**-0.5)


@law("the output is softmax(q.k / sqrt(d) + ln N) v, in the query's type", cases, always=BEYOND_ATTENTIONS)
def equals_the_definition(attention: Any, case: AttentionCase) -> None:
    tensors = case.tensors()
    out = attention(*tensors, causal=case.causal)
    expect(out.dtype == tensors[0].dtype, f"{tensors[0].dtype}", out.dtype)
    _expect_close(out, oracles.attention(*tensors, case.size**-0.5, case.causal), _bound(case, *tensors))


@law("a slot of degree N acts as N slots of degree 1", cases, always=BEYOND_ATTENTIONS)
def degree_counts_copies(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    degree = (degree[:1, :1] % 4 + 1).expand(degree.shape).contiguous()
    copies = degree[0, 0].long()
    many = [x.repeat_interleave(copies, 2) for x in (keys, values)]
    out = attention(query, keys, values, degree, causal=False)
    ones = torch.ones(*degree.shape[:2], int(copies.sum()))
    bound = _bound(case, query, many[0], many[1], degree)
    _expect_close(out, attention(query, *many, ones, causal=False), 2 * bound)


@law("a slot of degree 0 does not exist, whatever its key and value", cases, always=BEYOND_ATTENTIONS)
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


@law("the order of slots does not matter to a query that sees them all", cases, always=BEYOND_ATTENTIONS)
def slots_are_a_set(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    order = torch.randperm(case.slots, generator=torch.Generator().manual_seed(case.seed))
    shuffled = (keys[:, :, order], values[:, :, order], degree[..., order])
    out = attention(query, keys, values, degree, causal=False)
    _expect_close(attention(query, *shuffled, causal=False), out, 2 * _bound(case, query, keys, values, degree))


@law("multiplying all degrees by one number changes nothing", cases, always=BEYOND_ATTENTIONS)
def only_ratios_of_degrees_matter(attention: Any, case: AttentionCase) -> None:
    query, keys, values, degree = case.tensors()
    out = attention(query, keys, values, degree, causal=case.causal)
    bound = _bound(case, query, keys, values, degree * 64)
    _expect_close(attention(query, keys, values, degree * 64, causal=case.causal), out, 2 * bound)


@law("the same input gives the same output, whatever was asked in between, and no input is written to", cases,
     first=(AttentionCase(20, 3, heads=2, groups=2, seed=7),))  # fmt: skip
def remembers_nothing(attention: Any, case: AttentionCase) -> None:
    longer = replace(case, slots=case.slots + 70, seed=case.seed + 1)
    more = replace(case, batch=case.batch + 1, causal=not case.causal)
    other = replace(case, seed=case.seed + 2)  # of the same shapes: a buffer that is kept by shape must be filled again

    def ask(one: Any, which: AttentionCase) -> Tensor:
        names = ("query", "keys", "values", "degree")
        inputs = dict(zip(names, which.tensors(), strict=True))
        return expect_inputs_unchanged(lambda *given: one(*given, causal=which.causal), **inputs)

    expect_no_memory(attention, ask, [case, longer, case, more, other])


@law("the output of a row and a KV head's queries depends on that row and head alone", cases,
     always=BEYOND_ATTENTIONS[:3])  # fmt: skip
def rows_and_heads_attend_alone(attention: Any, case: AttentionCase) -> None:
    mine, other = case.tensors(), replace(case, seed=case.seed + 1009).tensors()
    base = attention(*mine, causal=case.causal)
    bound = 2 * max(_bound(case, *mine), _bound(case, *other))
    for row, head in {(0, 0), (case.batch - 1, case.heads - 1)}:
        chosen = torch.zeros(case.batch, case.heads, dtype=torch.bool)
        chosen[row, head] = True
        asked = chosen.repeat_interleave(case.groups, 1)
        for changed, queries, still in ((chosen, asked, ~asked), (~chosen, ~asked, asked)):
            mixed = [
                torch.where((queries if place == 0 else changed).reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), y, x)
                for place, (x, y) in enumerate(zip(mine, other, strict=True))
            ]
            out = attention(*mixed, causal=case.causal)
            expect_same(out[still], base[still], "outputs of rows and heads that did not change", bound)


ATTENTION_LAWS = (
    remembers_nothing,
    rows_and_heads_attend_alone,
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
