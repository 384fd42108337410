"""Arithmetic near the ends of a type's range: what must not overflow where every argument is finite.

The ordinary computation always comes first and its bits stand. Only where it left the range is it done again, on
numbers scaled by a power of two, which changes no digit of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from centroidkv.errors import NonFiniteError

QUARTER = 0.25
"""x_b + sum s_t (x_t - x_b), s_t >= 0 adding up to at most 1, of numbers scaled by this stays within the type."""


def all_finite(x: Tensor) -> bool:
    """Whether every number of ``x`` is finite. One pass; on a GPU this waits for the answer.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    # A finite sum proves finite parts; only a suspicious one is worth the exact, slower look.
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return math.isfinite(x.sum(dtype=kind).item()) or bool(torch.isfinite(x).all())


def in_hull(compute: Callable[[float], Tensor], dtype: torch.dtype) -> Tensor:
    """``compute(1.0)`` in ``dtype``, for a mean that lies among its finite members: right also where it overflows.

    Args:
        compute: the mean of the members times a scale, in the type that sums are taken in; must scale the members
            before it subtracts or adds them.
        dtype: the members' type.

    >>> a, b = torch.tensor([3e38, 1.0]), torch.tensor([-3e38, 2.0])
    >>> in_hull(lambda scale: scale * a + 0.5 * (scale * b - scale * a), torch.float32).tolist()
    [0.0, 1.5]
    """
    mean = compute(1.0)
    # A difference or sum that overflows is infinite, and stays infinite or NaN to the end: so this finds all of them.
    # What is finite here is so in bfloat16 too, whose last number is further from infinity than a sum is from the mean;
    # float16 ends too close for that, where a cluster has thousands of members.
    exact, mean = mean, mean.to(dtype)
    if all_finite(mean if dtype == torch.float16 else exact):
        return mean
    limit = torch.finfo(dtype).max
    again = compute(QUARTER).clamp(-limit * QUARTER, limit * QUARTER) / QUARTER  # rounding may step over the end
    return torch.where(torch.isfinite(mean), mean, again.to(dtype))


def power_of_two(largest: Tensor) -> Tensor:
    """Powers of two that bring numbers as large as ``largest >= 0`` to between 1/2 and 4, elementwise; finite for 0.

    Scaling by them is exact, so whatever does not depend on scale keeps its bits. float32 or float64.

    >>> power_of_two(torch.tensor([3e38, 1.0, 3.0])) * torch.tensor([3e38, 1.0, 3.0])
    tensor([1.7632, 0.5000, 0.7500])
    """
    wide = largest.dtype == torch.float64
    held = largest.clamp(2.0 ** (-1000 if wide else -120), 2.0 ** (1022 if wide else 126))
    return torch.frexp(held).mantissa / held  # exact: the mantissa is the number times this power


def largest_of(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Max |x| over ``dim``, kept as axes of length 1; 0 where there is nothing."""
    dims = (dim,) if isinstance(dim, int) else dim
    if any(x.shape[axis] == 0 for axis in dims):
        return x.sum(dims, keepdim=True)
    return x.abs().amax(dims, keepdim=True)


def row_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows [..., D]`` and their lengths ``[..., 1]``; all scaled by powers of two if squares of some leave the range.

    For what ignores the length of a row, such as a direction: where ``rows`` come back as they are, nothing was scaled.
    """
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if bool(((norm < 2.0**60) & (norm > 2.0**-60)).all()):  # a length of 0 may be that of a tiny row
        return rows, norm
    rows = rows * power_of_two(largest_of(rows, -1))
    return rows, torch.linalg.vector_norm(rows, dim=-1, keepdim=True)


def require_finite(x: Tensor, what: str) -> Tensor:
    """``x`` itself.

    Raises:
        NonFiniteError: it holds NaN or infinity; ``what`` says what it is and what to do.
    """
    if not all_finite(x):
        raise NonFiniteError(what)
    return x
