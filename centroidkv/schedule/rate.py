"""The range of a rate. Not a stage itself."""

from __future__ import annotations

from centroidkv.errors import StageError


def check_rate(name: str, rate: float) -> None:
    """Refuse a rate that one round cannot carry out."""
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 0.5:
        raise StageError(
            f"{name} is the share of slots that one round removes; matching pairs removes at most half, so it lies in "
            f"[0, 0.5], got {rate!r}. For more compression let the budget ask for more rounds"
        )
