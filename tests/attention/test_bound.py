"""The bound on the error of one merge, as a property."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv.attention.bound import merge_error_bound


def merge(members, rest, size, scale, seed):
    """Exact and merged attention output of one query, and the bound's ingredients; all float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, centre = normal(size), normal(size)
    keys = torch.cat((centre + scale * normal(members, size), normal(rest, size)))
    values = normal(members + rest, 3)
    degree = torch.randint(1, 9, (members + rest,), generator=generator).double()

    def attend(k, v, n):
        weights = n * (size**-0.5 * k @ query).exp()
        return weights @ v / weights.sum(), weights / weights.sum()

    exact, _ = attend(keys, values, degree)
    share = degree[:members] / degree[:members].sum()
    key, value = share @ keys[:members], share @ values[:members]
    merged_keys = torch.cat((key[None], keys[members:]))
    merged_values = torch.cat((value[None], values[members:]))
    merged_degree = torch.cat((degree[:members].sum()[None], degree[members:]))
    merged, weights = attend(merged_keys, merged_values, merged_degree)
    others = weights[1:] @ merged_values[1:] / weights[1:].sum() if rest else value
    bound = merge_error_bound(
        size**-0.5 * query.norm() * (keys[:members] - key).norm(dim=-1).max(),
        weights[0],
        (value - others).norm(),
        share @ (values[:members] - value).norm(dim=-1),
    )
    return (exact - merged).norm(), bound


@given(st.integers(1, 6), st.integers(0, 8), st.integers(1, 8), st.floats(0, 4), st.integers(0, 10**6))
def test_no_merge_moves_attention_further_than_the_bound(members, rest, size, scale, seed):
    error, bound = merge(members, rest, size, scale, seed)
    assert error <= bound * (1 + 1e-9) + 1e-12


def test_the_bound_is_not_idle():
    """It grows with what it should grow with, and real merges come within a small factor of it."""
    ratios = [float(error / bound) for error, bound in (merge(2, 5, 1, 0.3, seed) for seed in range(200))]
    assert max(ratios) > 0.5


def test_equal_keys_cost_nothing():
    error, bound = merge(4, 5, 8, 0.0, 1)
    assert bound < 1e-12
    assert error < 1e-12


def test_the_bound_is_never_nan():
    """Also where exp(spread) overflows: then it is infinite, or 0 where there is nothing to move."""
    numbers = torch.tensor([0.0, 0.3, 1.0])
    spread, weight, rest, values = torch.meshgrid(
        torch.tensor([0.0, 5.0, 1e3]), numbers, numbers, numbers, indexing="ij"
    )
    bound = merge_error_bound(spread, weight, rest, values)
    assert not bound.isnan().any()
    assert bound[spread < 100].isfinite().all()
    assert (bound[(weight == 0) | ((rest == 0) & (values == 0))] == 0).all()
    assert (bound[(spread > 100) & (weight == 0.3) & (rest > 0)] == torch.inf).all()
