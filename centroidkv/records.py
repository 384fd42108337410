"""The small frozen records that stages exchange: Budget, Partition, Assignment, Plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import BudgetError, ShapeError, StageError

__all__ = [
    "Assignment",
    "Block",
    "Budget",
    "Partition",
    "Plan",
]


def exact_share(share: float, count: int) -> Fraction:
    """``share * count`` without binary rounding: 0.1 of 30 is 3, not 3.0000000000000004.

    The one place where a share meets a count; callers round the result up or down, and say which.
    """
    return Fraction(str(share)) * count


@dataclass(frozen=True)
class Budget:
    """How many slots a row may keep: a share of the tokens it has seen, or a fixed number.

    >>> Budget.ratio(0.25).slots(1001), Budget.tokens(512).slots(1001), Budget.ratio(0.25).slots(1)
    (250, 512, 1)
    """

    kind: str
    amount: float

    def __post_init__(self) -> None:
        amount = self.amount
        # Whole numbers are finite, also those beyond a float's range, which math.isfinite cannot look at.
        finite = isinstance(amount, Integral) or (isinstance(amount, Real) and math.isfinite(amount))
        if isinstance(amount, bool) or not finite:
            raise BudgetError(f"a budget is a finite number, got {amount!r}")
        plain = int(amount) if isinstance(amount, Integral) else float(amount)  # NumPy numbers are welcome
        object.__setattr__(self, "amount", plain)
        amount = plain
        if self.kind == "ratio":
            if not 0 < amount <= 1:
                raise BudgetError(
                    f"Budget.ratio is the share of tokens to keep, in (0, 1], got {amount!r}; "
                    "for a number of slots use Budget.tokens"
                )
        elif self.kind == "tokens":
            if not isinstance(amount, int) or amount < 1:
                raise BudgetError(
                    f"Budget.tokens is a whole number of slots >= 1, got {amount!r}; for a share use Budget.ratio"
                )
        else:
            raise BudgetError(f"a budget is a 'ratio' or 'tokens', got {self.kind!r}")

    @classmethod
    def ratio(cls, share: float) -> Budget:
        """Keep at most this share of the tokens seen: floor(share * seen), and at least one."""
        return cls("ratio", share)

    @classmethod
    def tokens(cls, count: int) -> Budget:
        """Keep at most this many slots, however many tokens were seen."""
        return cls("tokens", count)

    @classmethod
    def of(cls, value: Budget | float) -> Budget:
        """A budget as is; a float is a ratio, an int is a number of slots."""
        if isinstance(value, Budget):
            return value
        return cls("tokens" if isinstance(value, Integral) and not isinstance(value, bool) else "ratio", value)

    def slots(self, seen: int) -> int:
        """The whole number of slots allowed after ``seen`` tokens. The only rounding of a budget: down, at least 1."""
        if self.kind == "tokens":
            return int(self.amount)
        return max(1, math.floor(exact_share(self.amount, seen)))

    def __repr__(self) -> str:
        return f"Budget.{self.kind}({self.amount})"


@dataclass(frozen=True, eq=False)
class Block:
    """Chunks of equal length: ``sources [C, a]`` and ``targets [C, b]``, slot indices of C chunks."""

    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Partition:
    """Which of ``length`` slots may merge (sources) and into which slots of their chunk they may merge (targets).

    Blocks hold chunks of equal length, so that a chunk is one batch entry: usually one block of full chunks and one
    of the shorter tail. Slots in neither list are kept as they are.
    """

    length: int
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        parts = [part for block in self.blocks for part in (block.sources, block.targets)]
        if any(part.device.type != "cpu" for part in parts):
            return  # moved there by to(), hence checked before; looking again would wait for the device
        used = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, dtype=torch.long)
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= self.length):
            raise StageError(f"a partition of {self.length} slots names slots outside 0..{self.length - 1}")
        if used.unique().numel() != used.numel():
            raise StageError("a partition names a slot twice; sources, targets and chunks must be disjoint")

    @classmethod
    def whole(cls, sources: Tensor, targets: Tensor, length: int) -> Partition:
        """One chunk over the whole sequence, from two index lists."""
        pair = [torch.as_tensor(part).reshape(1, -1) for part in (sources, targets)]
        if any(part.numel() and (part.is_floating_point() or part.dtype == torch.bool) for part in pair):
            raise StageError(f"a partition lists slot numbers, got {[str(part.dtype) for part in pair]}")
        pair = [part.long() for part in pair]
        return cls(length, (Block(*pair),))

    @property
    def sources(self) -> Tensor:
        """All source slots, ascending."""
        return _ascending([block.sources for block in self.blocks])

    @property
    def targets(self) -> Tensor:
        """All target slots, ascending."""
        return _ascending([block.targets for block in self.blocks])

    @property
    def capacity(self) -> int:
        """How many sources have a target, but at most half of the slots: the most that one round removes."""
        return min(sum(self.chunk_capacities), self.length // 2)

    @property
    def chunk_capacities(self) -> list[int]:
        """Sources with a target, chunk by chunk, in the order of the blocks."""
        return [
            block.sources.shape[1] if block.targets.shape[1] else 0
            for block in self.blocks
            for _ in range(block.sources.shape[0])
        ]

    def to(self, device: torch.device) -> Partition:
        """The same partition with its indices on ``device``."""
        if all(block.sources.device == device for block in self.blocks):
            return self
        moved = tuple(Block(block.sources.to(device), block.targets.to(device)) for block in self.blocks)
        return Partition(self.length, moved)

    def __repr__(self) -> str:
        return f"Partition({self.length} slots: {self.sources.numel()} sources, {self.targets.numel()} targets)"


def _ascending(parts: list[Tensor]) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.long)
    return torch.cat([part.reshape(-1) for part in parts]).sort().values


@dataclass(frozen=True, eq=False)
class Assignment:
    """What every matcher decides and every aggregator carries out: per slot, the slot it joins.

    Args:
        joins: ``[B, H, T]`` int64. ``joins[i] == i``: slot i stays; ``joins[i] == j``: its mass moves to slot j, which
            must stay; ``joins[i] == -1``: it is evicted.

    >>> Assignment(torch.tensor([[[0, 0, 2, -1]]]))
    Assignment(4 slots: 2 stay, 1 merge, 1 evicted)
    """

    joins: Tensor

    def __post_init__(self) -> None:
        if self.joins.ndim != 3 or self.joins.dtype != torch.int64:
            raise ShapeError(f"joins must be int64 [B, H, T], got {self.joins.dtype} {tuple(self.joins.shape)}")

    @property
    def stays(self) -> Tensor:
        """``[B, H, T]`` bool: slots that survive the round."""
        return self.joins == torch.arange(self.joins.shape[-1], device=self.joins.device)

    @property
    def evicted(self) -> Tensor:
        """``[B, H, T]`` bool: slots whose mass is given up."""
        return self.joins < 0

    @property
    def merges(self) -> Tensor:
        """``[B, H, T]`` bool: slots that join another one."""
        return ~(self.stays | self.evicted)

    def validate(self) -> Assignment:
        """Check that every slot joins one that stays.

        Raises:
            StageError: a target is out of range, or is itself merged away or evicted.
        """
        slots = self.joins.shape[-1]
        if self.joins.numel() and not -1 <= int(self.joins.min()) <= int(self.joins.max()) < slots:
            raise StageError(
                f"an assignment over {slots} slots holds -1 (evicted) to {slots - 1}, got {int(self.joins.min())} to "
                f"{int(self.joins.max())}"
            )
        if bool((self.merges & ~self.stays.gather(-1, self.joins.clamp(min=0))).any()):
            raise StageError("a slot joins one that does not stay itself; the mass would be lost. Join the final slot")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {"joins": self.joins.tolist()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Assignment:
        """The inverse of :meth:`to_dict`."""
        return cls(torch.tensor(data["joins"], dtype=torch.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assignment) and torch.equal(self.joins, other.joins)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        stay, gone = int(self.stays.sum()), int(self.evicted.sum())
        merge = self.joins.numel() - stay - gone
        return f"Assignment({self.joins.numel()} slots: {stay} stay, {merge} merge, {gone} evicted)"


@dataclass(frozen=True)
class Plan:
    """The integer sizes of one compression: a pure function of lengths and configuration.

    Args:
        slots: slots before.
        budget: slots allowed after.
        preserved: slots that are set aside and stay bit-identical.
        sizes: compressible slots after each round.

    >>> Plan(slots=100, budget=40, preserved=10, sizes=(45, 30)).removed
    (45, 15)
    """

    slots: int
    budget: int
    preserved: int
    sizes: tuple[int, ...] = ()

    @property
    def compressible(self) -> int:
        """Slots that take part in clustering."""
        return self.slots - self.preserved

    @property
    def removed(self) -> tuple[int, ...]:
        """Slots removed by each round."""
        before = (self.compressible, *self.sizes)
        return tuple(a - b for a, b in zip(before, self.sizes, strict=False))

    @property
    def final(self) -> int:
        """Slots after the last round, preserved ones included."""
        return self.preserved + (self.sizes[-1] if self.sizes else self.compressible)

    @property
    def met(self) -> bool:
        """Whether the budget is reached."""
        return self.final <= self.budget
