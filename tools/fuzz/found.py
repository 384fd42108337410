"""What a case may find, and what the oracle allows. Copied into failing scripts."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Wrong(AssertionError):
    """A fault of the library. ``sort`` is its kind: "difference", "state", "refusal", "unnamed" or "raw error"."""

    def __init__(self, sort: str, message: str) -> None:
        super().__init__(f"{sort}: {message}")
        self.sort = sort


def expect(holds: Any, sort: str, message: str) -> None:
    """Raise :class:`Wrong` unless ``holds``."""
    if not holds:
        raise Wrong(sort, message)


MULTIPLE = 12
"""How many times the plain computation's own rounding error a result may be off."""


def expect_close(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """``got`` is as near to ``exact`` (float64) as ``plain``, the same computation in the same type, is.

    |got - exact| <= 12 max|plain - exact| + 32 (u + 2^-20) max|exact|, u the unit roundoff of got's type, 2^-20 for
    degrees and RoPE, which are float32 whatever the type.
    Where the plain computation is not finite there is nothing to compare.
    """
    expect(got.shape == exact.shape, "difference", f"{what}: shape {tuple(got.shape)}, not {tuple(exact.shape)}")
    if not bool(plain.isfinite().all()):
        return
    expect(got.isfinite().all(), "difference", f"{what}: NaN or infinity, where a plain cache has neither")
    if not got.numel():
        return
    size = float(exact.abs().max())
    roundoff = torch.finfo(got.dtype).eps / 2
    off = float((got.double() - exact).abs().max())
    own = float((plain.double() - exact).abs().max())
    # A 16-bit result is judged by its own rounding, found to be 0.3 to 3 % of the largest logit in these models.
    allowed = MULTIPLE * own + 32 * (min(roundoff, 2.0**-11) + 2.0**-20) * size
    expect(
        off <= allowed,
        "difference",
        f"{what}: off by {off:.2e} of {size:.2e}; a plain cache is off by {own:.2e}, allowed are {allowed:.2e}",
    )


def thread_facts() -> tuple[int, int, int]:
    """(Python's threads, PyTorch's threads per operation here, and in a thread that starts now)."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return threading.active_count(), torch.get_num_threads(), found[0]


def check_threads(before: tuple[int, int, int]) -> None:
    """Raise if a case left threads behind, or changed how many PyTorch uses; puts that right for the next case."""
    after = thread_facts()
    if after != before:
        torch.set_num_threads(before[1])
    expect(after[0] == before[0], "threads", f"{after[0] - before[0]} threads are left")
    expect(
        after[1:] == before[1:], "threads", f"PyTorch's threads here and in new threads: {after[1:]}, not {before[1:]}"
    )
