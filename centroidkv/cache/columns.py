"""Which columns of a batch were padding: what masks are told apart by once slots are no longer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class Columns:
    """The padding among the columns that a batch has seen. A column is one token of every row, real or padding.

    Masks have a column per token, or per slot where a layer was clustered. What a mask hides because it is padding must
    be told apart from what it hides for other reasons, and that takes a record of every column.

    Args:
        padding: ``[B, n]`` bool for the first n columns; None: none was padding. Columns after those are all real.

    >>> columns = Columns().add(torch.tensor([[False, True, True], [True, True, True]]), start=0)
    >>> columns.padding.tolist(), columns.between(1, 5) is None
    ([[True, False, False], [False, False, False]], True)
    """

    padding: Tensor | None = None

    def add(self, real: Tensor | None, start: int) -> Columns:
        """With new columns after the first ``start`` ones: ``real [B, L]``, None for real ones only."""
        before = self.until(start)
        if real is None:
            return before
        old = real.new_zeros(real.shape[0], start) if before.padding is None else before.padding.to(real.device)
        return Columns(torch.cat((pad(old, (0, start - old.shape[1])), ~real), 1))

    def until(self, length: int) -> Columns:
        """Of the first ``length`` columns alone."""
        if self.padding is None or self.padding.shape[1] <= length:
            return self
        left = self.padding[:, :length]
        return Columns(left.clone() if bool(left.any()) else None)

    def rows(self, index: Tensor) -> Columns:
        """Rows kept, repeated or permuted."""
        return self if self.padding is None else Columns(self.padding[index.to(self.padding.device)])

    def between(self, first: int, last: int) -> Tensor | None:
        """The padding ``[B, last - first]`` among these columns; None if there is none."""
        if self.padding is None or first >= self.padding.shape[1]:
            return None
        part = self.padding[:, first:last]
        return pad(part, (0, last - first - part.shape[1])) if bool(part.any()) else None

    @cached_property
    def inner(self) -> bool:
        """Whether a row has padding after its first real token."""
        if self.padding is None:
            return False
        return bool((self.padding & ((~self.padding).cumsum(-1) > 0)).any())

    def to_runs(self) -> list[list[int]] | None:
        """For JSON: per row the lengths of runs of real columns and of padding in turn, real ones first."""
        if self.padding is None:
            return None
        return [_runs(row) for row in self.padding.tolist()]

    @classmethod
    def from_runs(cls, runs: Sequence[Sequence[int]] | None) -> Columns:
        """The inverse of :meth:`to_runs`.

        >>> Columns.from_runs([[0, 2, 3], [5]]).padding.long().tolist()
        [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
        """
        if runs is None:
            return cls()
        rows = [[number % 2 == 1 for number, length in enumerate(row) for _ in range(length)] for row in runs]
        return cls(torch.tensor(rows, dtype=torch.bool))


def _runs(row: list[bool]) -> list[int]:
    lengths = [len(list(run)) for _, run in groupby(row)]
    return [0, *lengths] if row and row[0] else lengths
