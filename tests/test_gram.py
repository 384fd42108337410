"""Gram matrices of any rank, against float64 and against what is known of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv.errors import NonFiniteError, ShapeError
from centroidkv.gram import BLOCK, factorise, gram


@given(
    rows=st.integers(0, 60), size=st.sampled_from([1, 5, 24]), rank=st.integers(0, 6), seed=st.integers(0, 99),
    power=st.sampled_from([-30, 0, 12]), ridge=st.sampled_from([0.0, 1e-8, 1e-3]),
)  # fmt: skip
def test_matrices_of_any_rank_have_a_factor_and_solutions(rows, size, rank, seed, power, ridge):
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    x = (torch.randn(2, rows, rank, **draw) @ torch.randn(2, rank, size, **draw) * 10.0**power).float()
    mass = torch.randint(0, 5, (2, rows, 1), generator=generator).float()
    matrix = gram(x, mass)
    assert torch.allclose(matrix, x.double().mT @ (mass * x.double()), rtol=1e-9, atol=1e-30)
    factor = factorise(matrix, ridge)
    whole = matrix + factor.ridge * torch.eye(size)
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    wanted = torch.where(level > 0, ridge * level, torch.finfo(torch.float32).tiny)
    assert torch.allclose(factor.ridge, wanted, rtol=1e-9, atol=0) or ridge == 0
    assert (factor.ridge <= 1e-2 * level + torch.finfo(torch.float32).tiny).all()
    assert torch.allclose(factor.lower @ factor.lower.mT, whole, rtol=1e-9, atol=float(1e-12 * whole.abs().max()))
    right = torch.randn(2, size, 3, **draw)
    off = (whole @ factor.solve(right) - right).norm() / (whole.norm() * factor.solve(right).norm() + right.norm())
    assert off < 10 * size**2 * 2**-53


def test_white_rows_have_the_length_of_the_quadratic_form():
    x = torch.randn(3, 40, 8)
    factor = factorise(gram(x), 1e-3)
    wanted = (x.double() * factor.solve(x.double().mT).mT).sum(-1)
    assert torch.allclose(factor.whiten(x).square().sum(-1).double(), wanted, rtol=1e-5)
    assert factor.whiten(x).dtype == torch.float32


@pytest.mark.parametrize("size", [16, 64, 128])
def test_a_thousand_equal_rows_and_another_one(size):
    """In float32 such a sum is not semidefinite: every addition is rounded the same way."""
    for count in (1000, 20_000):
        x = torch.randn(1, size).repeat(count, 1)
        x[0] = torch.randn(size)
        x = x - x.mean(0)
        eigen = torch.linalg.eigvalsh(gram(x))
        assert eigen.min() > -1e-12 * eigen.max()
        factorise(gram(x), ridge=1e-9)
        assert factorise(x.T @ x, ridge=1e-9).ridge <= 1e-2 * x.square().sum() / size  # added up in float32


def test_sums_go_on_over_blocks():
    x = torch.randn(2, 2 * BLOCK // (2 * 4) + 3, 4)
    assert torch.allclose(gram(x), x.double().mT @ x.double(), rtol=1e-12)


def test_no_rows_and_no_channels():
    assert factorise(gram(torch.zeros(2, 0, 4)), 1e-4).lower.isfinite().all()
    assert factorise(gram(torch.zeros(2, 5, 0)), 1e-4).lower.shape == (2, 0, 0)
    assert factorise(torch.zeros(0, 4, 4), 1e-4).lower.shape == (0, 4, 4)


def test_what_is_not_a_gram_matrix_is_refused():
    with pytest.raises(ShapeError, match="square"):
        factorise(torch.zeros(3, 4), 0.1)
    with pytest.raises(ShapeError, match="mass"):
        gram(torch.zeros(3, 4), torch.ones(3))
    with pytest.raises(NonFiniteError, match="semidefinite"):
        factorise(-torch.eye(3), 0.1)
    for value in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            factorise(torch.full((2, 3, 3), value), 0.1)
