"""Rates that fall from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from centroidkv.errors import StageError
from centroidkv.schedule.rate import check_rate


@dataclass(frozen=True)
class LinearAnnealing:
    """r_j = max(initial - j * delta, minimum): later rounds, on slots that are already centroids, are more selective.

    Args:
        initial: share of the compressible slots that round 0 removes, in [0, 0.5].
        delta: how much the share falls per round, >= 0.
        minimum: where it stops falling (at ``initial`` if that is smaller). Above 0 every budget is reached in the
            end; 0 ends the run after ``initial / delta`` rounds, reached or not, and the result then says so.

    Source: CentroidKV, arXiv 2506.11418; the minimum is ours.

    >>> [LinearAnnealing(initial=0.5, delta=0.2)(j) for j in range(4)]
    [0.5, 0.3, 0.1, 0.05]
    """

    initial: float = 0.5
    delta: float = 0.05
    minimum: float = 0.05

    def __post_init__(self) -> None:
        check_rate("LinearAnnealing(initial=...)", self.initial)
        check_rate("LinearAnnealing(minimum=...)", self.minimum)
        if not isinstance(self.delta, int | float) or not 0 <= self.delta <= 0.5:
            raise StageError(f"LinearAnnealing takes a delta in [0, 0.5], got {self.delta!r}")

    def __call__(self, round_index: int) -> float:
        # Decimal arithmetic: 0.5 - 2 * 0.2 is 0.1, not 0.09999999999999998.
        rate = Fraction(str(self.initial)) - round_index * Fraction(str(self.delta))
        return float(max(rate, Fraction(str(min(self.minimum, self.initial)))))
