"""Where in a model its layers lie."""

from __future__ import annotations

from collections.abc import Iterable


def depths_of(indices: Iterable[int], layers: int) -> list[float]:
    """(i + 1/2) / n for each layer i of ``indices``, of a model with n = ``layers``: what allocations are asked with.

    >>> depths_of([0, 2, 3], 4)
    [0.125, 0.625, 0.875]
    """
    return [(index + 0.5) / layers for index in indices]
