"""Any number of preservers together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.errors import BudgetError, StageError
from centroidkv.protocols import Preserver
from centroidkv.records import Budget
from centroidkv.state import KVState


@dataclass(frozen=True)
class MaskPreserver:
    """A plain function ``state -> mask [B, H, T]`` as a preserver."""

    function: Callable[[KVState], Tensor]
    share = None

    def count(self, free_budget: int) -> int:
        raise StageError(
            f"{self.function!r} says which slots to preserve only once it sees them, so sizes cannot be planned ahead; "
            "give it the methods count(free_budget) and select(state, free, count) (centroidkv.protocols.Preserver)"
        )

    def select(self, state: KVState, free: Tensor, count: int) -> Tensor:
        mask = self.function(state)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != free.shape:
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise StageError(f"a preserver function returns a bool mask [B, H, T] = {tuple(free.shape)}, got {got}")
        return mask & free


@dataclass(frozen=True)
class Union:
    """Preservers applied one after the other, each choosing among the slots that are still free.

    Fixed counts come first and shares divide what they leave of the budget, whatever the order of writing. Choosing
    among free slots only keeps the number of preserved slots the same in every head.
    """

    members: tuple[Preserver, ...]

    @property
    def fixed(self) -> list[Preserver]:
        return [member for member in self.members if member.share is None]

    @property
    def shared(self) -> list[Preserver]:
        return [member for member in self.members if member.share is not None]

    @property
    def countable(self) -> bool:
        """Whether counts are known ahead of the data: no member is a plain function."""
        return not any(isinstance(member, MaskPreserver) for member in self.members)

    def check_budget(self, budget: Budget, evicts: bool) -> None:
        """What can be known before any data: shares, and a budget in tokens against fixed counts.

        Raises:
            BudgetError: shares add up to more than all of the budget, or fixed counts to more than its slots.
        """
        total = sum(member.share or 0.0 for member in self.shared)
        if total > 1 + 1e-9 or (total > 1 - 1e-9 and not evicts):
            raise BudgetError(
                f"the shares of {', '.join(map(repr, self.shared))} add up to {total:g} of the free budget"
                + ("" if evicts or total > 1 + 1e-9 else ", which leaves no slot for centroids")
                + "; they must add up to "
                + ("at most 1" if evicts else "less than 1 (to 1 only with matching(Evict()))")
            )
        if budget.kind != "tokens":
            return
        known = [member for member in self.fixed if not isinstance(member, MaskPreserver)]
        slots = budget.slots(0)
        fixed = sum(member.count(slots) for member in known)
        least = fixed + (0 if evicts else 1)
        if slots < least:
            raise BudgetError(
                f"{budget!r} cannot hold {' + '.join(map(repr, known))} = {fixed} preserved slots"
                f"{'' if evicts else ' and at least one centroid'}; use Budget.tokens({least}) or more, or preserve "
                "less"
            )

    def count(self, slots: int, budget: int) -> int:
        """How many of ``slots`` slots are set aside under ``budget``."""
        taken = 0
        for member in self.fixed:
            taken += min(member.count(budget), slots - taken)
        free_budget = max(budget - taken, 0)
        for member in self.shared:
            taken += min(member.count(free_budget), slots - taken)
        return taken

    def select(self, state: KVState, budget: int) -> Tensor:
        """The mask ``[B, H, T]`` of preserved slots: the same number in every (row, head)."""
        free = torch.ones_like(state.live)
        taken = 0
        for member in self.fixed:
            count = 0 if isinstance(member, MaskPreserver) else min(member.count(budget), state.slots - taken)
            taken += self._take(member, state, free, count)
        free_budget = max(budget - taken, 0)
        for member in self.shared:
            taken += self._take(member, state, free, min(member.count(free_budget), state.slots - taken))
        return ~free

    @staticmethod
    def _take(member: Preserver, state: KVState, free: Tensor, count: int) -> int:
        """Let ``member`` choose; clears its slots in ``free``, in place, and returns how many they are."""
        chosen = member.select(state, free.clone(), count)
        if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool or chosen.shape != free.shape:
            raise StageError(f"{member!r} must select a bool mask [B, H, T] = {tuple(free.shape)}, got {chosen!r}")
        chosen = chosen & free
        counts = chosen.sum(-1)
        expected = counts.flatten()[0] if isinstance(member, MaskPreserver) and counts.numel() else count
        if not bool((counts == expected).all()):
            raise StageError(
                f"{member!r} must preserve {int(expected)} slots in every row and head, it chose between "
                f"{int(counts.min())} and {int(counts.max())}; shapes would differ between heads"
            )
        free &= ~chosen
        return int(expected)
