"""The same rate in every round."""

from __future__ import annotations

from dataclasses import dataclass

from centroidkv.schedule.rate import check_rate


@dataclass(frozen=True)
class Constant:
    """r_j = rate, in [0, 0.5]. A rate of 0 removes nothing: the compressor becomes the identity.

    >>> Constant(0.1)(0), Constant(0.1)(99)
    (0.1, 0.1)
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        check_rate("Constant(rate=...)", self.rate)

    def __call__(self, round_index: int) -> float:
        return self.rate
