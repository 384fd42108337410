"""Gram matrices, factorised safely at any rank: the one place where this package solves linear systems.

A Gram matrix of few distinct rows has a low rank, and one that was added up in float32 is not even positive
semidefinite: a thousand equal numbers, each added to a sum a thousand times larger, are rounded the same way each time.
So matrices are added up in float64, whose rounding is far below any ridge in use, and factorised there; they are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.errors import NonFiniteError, ShapeError

BLOCK = 2**17
"""Numbers converted to float64 at once on the CPU: few enough to stay in a core's cache."""
GPU_BLOCK = 2**26
MOST_RIDGE = 1e-2
"""A matrix that needs a larger ridge, as a share of its mean diagonal, is not positive semidefinite up to rounding."""


@dataclass(frozen=True, eq=False)
class Factor:
    """The Cholesky factor of a regularised matrix: L L^T = G + r I.

    Args:
        lower: L ``[..., D, D]`` float64, lower triangular.
        ridge: r ``[..., 1, 1]`` float64, the ridge that was used.
    """

    lower: Tensor
    ridge: Tensor

    def solve(self, right: Tensor) -> Tensor:
        """(G + r I)^-1 ``right [..., D, n]``, float64.

        Backward stable: what comes out solves a system whose matrix is off by at most 10 D^2 u of its largest entry, u
        = 2^-53. The relative error is that times the condition number, at most 1 + D max diagonal / r.
        """
        return torch.cholesky_solve(right.double(), self.lower)

    def root(self) -> Tensor:
        """L^-1 ``[..., D, D]`` float64; its squared entries add up to the trace of (G + r I)^-1."""
        eye = torch.eye(self.lower.shape[-1], dtype=self.lower.dtype, device=self.lower.device)
        return torch.linalg.solve_triangular(self.lower, eye, upper=False)

    def whiten(self, rows: Tensor) -> Tensor:
        """``rows [..., T, D]`` times L^-T, so that |row|^2 becomes row^T (G + r I)^-1 row; in the rows' type.

        One product with :meth:`root`, so each number is off by at most (D + 1) u |row| / sqrt(r), u the rows' unit
        roundoff.
        """
        return rows @ self.root().mT.to(rows.dtype)


def gram(rows: Tensor, mass: Tensor | None = None) -> Tensor:
    """G = sum_t m_t x_t x_t^T of ``rows [..., T, D]`` and ``mass [..., T, 1]`` (default 1): ``[..., D, D]`` float64.

    Products and sums are float64, so the error is below T 2^-53 of the trace. Symmetric up to that.

    >>> gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    tensor([[1., 2.],
            [2., 5.]], dtype=torch.float64)
    """
    if rows.ndim < 2 or (mass is not None and mass.shape != (*rows.shape[:-1], 1)):
        got = None if mass is None else tuple(mass.shape)
        raise ShapeError(f"rows are [..., T, D] and their mass [..., T, 1], got {tuple(rows.shape)} and {got}")
    count, size = rows.shape[-2:]
    total = rows.new_zeros(*rows.shape[:-2], size, size, dtype=torch.float64)
    width = max(rows.numel() // max(count, 1), 1)
    step = max(1, (BLOCK if rows.device.type == "cpu" else GPU_BLOCK) // width)
    for first in range(0, count, step):
        some = rows[..., first : first + step, :].double()
        weighted = some if mass is None else some * mass[..., first : first + step, :]
        total += weighted.mT @ some
    return total


def factorise(matrix: Tensor, ridge: float, least: Tensor | float = 0.0) -> Factor:
    """The factor of ``matrix [..., D, D]`` + r I, for a positive semidefinite matrix of any rank, zero included.

    r = max(``ridge`` * mean diagonal, ``least``, 8 D u * mean diagonal), u the unit roundoff of the matrix's type.
    Where rounding has left the matrix so far from semidefinite that this does not do (sums taken in float32), r grows
    fourfold until it does, up to 1e-2 of the mean diagonal; ``ridge`` of the result says what it is. For a zero matrix
    and ``least`` 0, r is the smallest normal float32, so that a factor exists.

    Args:
        matrix: symmetric (its lower triangle is read), finite; :func:`gram` makes it exactly enough for ridge 0.
        ridge: share of the mean diagonal, >= 0: directions with less than this are treated as noise.
        least: smallest r, a number or ``[..., 1, 1]``: what the rows are known to be uncertain by, squared and summed.

    Raises:
        NonFiniteError: the matrix holds NaN or infinity, or is not positive semidefinite.
        ShapeError: it is not square.

    >>> flat = torch.ones(3, 3)
    >>> factor = factorise(flat, ridge=1e-3)
    >>> back = factor.lower @ factor.lower.mT - factor.ridge * torch.eye(3)
    >>> bool(torch.allclose(back, flat.double()))
    True
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(f"a Gram matrix is square [..., D, D], got {tuple(matrix.shape)}")
    size = matrix.shape[-1]
    if not matrix.numel():
        return Factor(matrix.double(), matrix.new_zeros(*matrix.shape[:-2], 1, 1, dtype=torch.float64))
    rounding = 8 * size * torch.finfo(matrix.dtype).eps / 2
    matrix = matrix.double()
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    floor = torch.as_tensor(least, dtype=torch.float64, device=matrix.device)
    used = torch.maximum(max(ridge, rounding) * level.clamp(min=0), floor)
    used = torch.where(used > 2.0**-1000, used, torch.finfo(torch.float32).tiny)
    most = torch.maximum(used, MOST_RIDGE * level)
    eye = torch.eye(size, dtype=torch.float64, device=matrix.device)
    while True:
        lower, failed = torch.linalg.cholesky_ex(matrix + used * eye)
        wrong = (failed > 0)[..., None, None]
        if not bool(wrong.any()):
            if bool(torch.isfinite(lower).all()):
                return Factor(lower, used)
            raise NonFiniteError(_NOT_FINITE)
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError(_NOT_FINITE)
        if bool((wrong & (used >= most)).any()):
            raise NonFiniteError(
                f"a matrix to be factorised is not positive semidefinite: it has no factor even with a ridge of "
                f"{MOST_RIDGE:g} of its mean diagonal; pass a sum of products x x^T with masses >= 0"
            )
        used = torch.where(wrong, torch.minimum(4 * used, most), used)


_NOT_FINITE = (
    "a Gram matrix to be factorised holds NaN or infinity; scale its rows first (squares of numbers beyond 1e150 leave "
    "float64), or look for an overflow upstream"
)
