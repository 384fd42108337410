"""Laws of preservers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume
from torch import Tensor

from centroidkv.state import KVState
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.strategies import StateCase, states

cases = states(least=1, most=30)


def run(preserver: Any, case: StateCase, state: KVState | None = None) -> tuple[Tensor, Tensor, int]:
    """The mask chosen, the slots that were free, and how many were asked for."""
    state = case.state() if state is None else state
    assume(state.rotary is not None or not getattr(preserver, "needs_rotary", False))
    free = torch.ones_like(state.live)
    free[..., case.seed % 4 :: 4] = False
    count = min(preserver.count(case.slots // 2), int(free[0, 0].sum()))
    return preserver.select(state, free.clone(), count), free, count


@law("exactly the slots asked for are chosen in every row and head, all of them free", cases)
def chooses_that_many_free_slots(preserver: Any, case: StateCase) -> None:
    mask, free, count = run(preserver, case)
    expect(mask.dtype == torch.bool and mask.shape == free.shape, "a bool mask [B, H, T]", mask)
    expect((mask.sum(-1) == count).all(), f"{count} slots", mask.sum(-1).tolist())
    expect(not (mask & ~free).any(), "free slots only", mask.tolist())


@law("rows and heads choose on their own, and the same input gives the same choice", cases)
def rows_and_heads_choose_alone(preserver: Any, case: StateCase) -> None:
    assume(case.kind != "rotary")  # there a product over more rows may round a near-tie the other way
    state = case.state()
    together = run(preserver, case)[0]
    again = run(preserver, case)[0]
    expect(together.equal(again), f"{together.tolist()} again", again.tolist())
    if case.kind in ("ties", "equal", "duplicates", "zeros"):
        return
    alone = run(preserver, case, state.rows(torch.tensor([0])))[0]
    expect(alone.equal(together[:1]), f"{together[:1].tolist()}", alone.tolist())


@law("counts are whole numbers that do not fall when the budget grows, never more than the budget for a share", cases)
def counts_are_sound(preserver: Any, case: StateCase) -> None:
    counts = [preserver.count(budget) for budget in range(case.slots + 1)]
    expect(all(isinstance(count, int) and count >= 0 for count in counts), "whole numbers >= 0", counts)
    expect(counts == sorted(counts), "counts that do not fall", counts)
    if preserver.share is not None:
        expect(all(count <= budget for budget, count in enumerate(counts)), "at most the budget", counts)


PRESERVER_LAWS = (chooses_that_many_free_slots, rows_and_heads_choose_alone, counts_are_sound)


def check_preserver(preserver: Any, examples: int | None = None) -> None:
    """Check a preserver (an object with ``share``, ``count`` and ``select``) against every law of its family.

    >>> from centroidkv.preserve import Sinks
    >>> check_preserver(Sinks(2), examples=10)
    """
    check_all(PRESERVER_LAWS, preserver, examples)
