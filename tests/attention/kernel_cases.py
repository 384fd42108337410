"""Inputs for attention kernels: odd sizes, odd strides, ties, empty slots, large degrees; and scratch memory of NaN."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.testing.tolerances import attention_bound, roundoff

LAYOUTS = ("contiguous", "tokens first", "every second", "sizes first")
KINDS = ("gaussian", "duplicates", "zeros", "extreme")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; gaps hold NaN."""
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sizes first":
        return x.mT.contiguous().mT
    if layout == "every second":
        wide = torch.full([2 * n for n in x.shape], float("nan"), dtype=x.dtype)
        inner = wide[tuple(slice(1, None, 2) for _ in x.shape)]
        inner.copy_(x)
        return inner
    return x


def numbers(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if kind == "duplicates":
        return torch.randint(-1, 2, (*shape[:-1], 1), generator=generator).expand(shape).float()
    if kind == "zeros":
        return x * torch.randint(2, (*shape[:-1], 1), generator=generator)
    return 30 * x if kind == "extreme" else x  # logits of thousands: softmax is one-hot, exp would overflow


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    groups: int
    length: int
    slots: int
    size: int
    value_size: int
    dtype: torch.dtype
    kind: str
    layout: str
    empty: int  # in eighths of the slots
    blind: bool  # one head without live slots
    causal: bool
    splits: int
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        query = numbers(self.kind, (self.batch, self.heads * self.groups, self.length, self.size), generator)
        keys = numbers(self.kind, (self.batch, self.heads, self.slots, self.size), generator)
        values = torch.randn(self.batch, self.heads, self.slots, self.value_size, generator=generator)
        degree = 2.0 ** torch.randint(0, 24, keys.shape[:3], generator=generator) + 1
        degree[torch.randint(8, keys.shape[:3], generator=generator) < self.empty] = 0
        if self.blind:
            degree[0, -1] = 0
        query, keys, values = (laid_out(x.to(self.dtype), self.layout) for x in (query, keys, values))
        return query, keys, values, laid_out(degree[..., None], self.layout)[..., 0]


def kernel_cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        batch=st.integers(1, 2),
        heads=st.integers(1, 2),
        groups=st.sampled_from([1, 3, 8]),
        length=st.integers(1, 3),
        slots=st.sampled_from([3, 16, 17, 50, 70]),
        size=st.sampled_from([1, 5, 24, 64, 96]),
        value_size=st.sampled_from([1, 5, 16, 96]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        kind=st.sampled_from(KINDS),
        layout=st.sampled_from(LAYOUTS),
        empty=st.sampled_from([0, 3, 7]),
        blind=st.booleans(),
        causal=st.booleans(),
        splits=st.integers(1, 5),
        seed=st.integers(0, 99),
    )


def kernel_bound(inputs: tuple[Tensor, ...], scale: float) -> float:
    """How far apart kernel and reference may be: logits are float32 in both; weights and outputs are stored shorter."""
    exact = attention_bound(*(x.float() for x in inputs), scale)
    return 2 * exact + 4 * roundoff(inputs[0].dtype) * max(map(float, inputs[2].abs().flatten()), default=0.0)


@contextmanager
def memory_of_nan():
    """Freshly allocated memory holds NaN, as if something had been there before."""
    empty = torch.empty

    def full(*shape, **options):
        new = empty(*shape, **options)
        return new.fill_(float("nan")) if new.is_floating_point() else new

    with mock.patch.object(torch, "empty", full):
        yield
