"""Compressor: the assembled stages. Takes a KVState, returns a KVState."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from centroidkv.allocation import Even, spread
from centroidkv.dense import map_dense
from centroidkv.errors import BudgetError, BudgetNotMetWarning, ShapeError, StageError
from centroidkv.guards import in_own_types, refuse_gradients
from centroidkv.kernels import why_not_triton
from centroidkv.preserve.union import Union
from centroidkv.protocols import Aggregator, Allocation, Matcher, Partitioner, Schedule, Similarity
from centroidkv.records import Budget, Plan
from centroidkv.rounds import (
    Settings,
    Stages,
    blocked_rounds,
    kernels_take,
    native_rounds,
    reference_rounds,
    settings_of,
    triton_rounds,
)
from centroidkv.schedule import plan_sizes
from centroidkv.state import KVState

if TYPE_CHECKING:
    from centroidkv.builder import Builder

EVEN = Even()
_PARTS = ("partition", "similarity", "matching", "aggregate", "schedule", "budget", "allocation")


@dataclass(frozen=True)
class Compressor:
    """Preserve, then rounds of partition -> similarity -> matching -> aggregate, as the schedule and budget say.

    Build one with :meth:`builder` or take one from :mod:`centroidkv.presets`. A compressor holds no state: the same
    input gives the same output, bit for bit on one device, and one object serves all layers and sequences. A call
    takes the budget as it is; a cache or a press, which has several layers, asks :meth:`for_layers` first.

    >>> import torch
    >>> from centroidkv import Budget, Compressor, KVState
    >>> compressor = Compressor.builder().budget(Budget.ratio(0.5)).build()
    >>> smaller = compressor(KVState.from_kv(torch.randn(1, 2, 400, 16), torch.randn(1, 2, 400, 16)))
    >>> smaller.slots, smaller.degree.sum(-1).tolist()
    (200, [[400.0, 400.0]])
    """

    preservers: Union
    partition: Partitioner
    similarity: Similarity
    matching: Matcher
    aggregate: Aggregator
    schedule: Schedule
    budget: Budget
    backend: str = "auto"
    allocation: Allocation = EVEN

    @staticmethod
    def builder() -> Builder:
        """A :class:`~centroidkv.builder.Builder` with the paper's method as its default parts."""
        from centroidkv.builder import Builder  # builder imports this module

        return Builder()

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self, tokens: int, slots: int | None = None) -> Plan:
        """The sizes of all rounds for a row that has seen ``tokens`` tokens and holds ``slots`` slots (default: all).

        A pure function of its arguments and the configuration: the same for every layer, head and rank, and what
        :meth:`__call__` carries out.

        Raises:
            BudgetError: the budget is smaller than what must be preserved.
            StageError: a preserver is a plain function, whose count is known only from the data.
        """
        slots = tokens if slots is None else slots
        budget = self.budget.slots(tokens)
        if slots <= budget:
            return Plan(slots, budget, preserved=0)
        return self._plan(slots, budget, self.preservers.count(slots, budget))

    def for_layers(self, depths: Sequence[float]) -> list[Compressor]:
        """One compressor per layer, whose budgets share this one's as ``allocation`` says; themselves even.

        ``depths``: of the compressed layers, (i + 1/2) / n for layer i of n.

        >>> from centroidkv import presets
        >>> [layer.budget for layer in presets.balanced(0.25).for_layers([0.3, 0.7])]
        [Budget.ratio(0.125), Budget.ratio(0.375)]

        Raises:
            StageError: not one positive share per layer, or their mean is not 1.
            BudgetError: a layer's number of slots cannot hold what is to be preserved.
        """
        layers = [replace(self, budget=b, allocation=EVEN) for b in spread(self.budget, self.allocation, depths)]
        for layer in layers:
            layer.preservers.check_budget(layer.budget, evicts=not self._least_room)
        return layers

    @property
    def even(self) -> bool:
        """Whether all layers get the same budget, as the allocation's attribute ``even`` says."""
        return bool(getattr(self.allocation, "even", False))

    def fits(self, tokens: int, slots: int | None = None) -> bool:
        """Whether the budget of such a row leaves room beyond what must be preserved (cheaper than a plan).

        True as well where only the data can tell, because a preserver is a plain function.
        """
        slots = tokens if slots is None else slots
        budget = self.budget.slots(tokens)
        if not self.preservers.countable:
            return True
        preserved = self.preservers.count(slots, budget)
        return preserved < slots and budget - preserved >= self._least_room

    @property
    def _least_room(self) -> int:
        """Slots a budget must leave beyond the preserved ones: a centroid, unless everything else is evicted."""
        return 0 if getattr(self.matching, "evicts", False) else 1

    def _plan(self, slots: int, budget: int, preserved: int) -> Plan:
        room, least = budget - preserved, self._least_room
        if preserved < slots and room < least:
            raise BudgetError(
                f"a budget of {budget} slots ({self.budget!r}) cannot hold the {preserved} preserved slots "
                f"{self._preserved_names()}{' and at least one centroid' if least else ''} of a row with {slots} "
                f"slots; raise the budget to at least {preserved + least}, or preserve less"
            )
        return Plan(slots, budget, preserved, plan_sizes(self.schedule, slots - preserved, room, self.stages.capacity))

    def _preserved_names(self) -> str:
        return "(" + (" + ".join(map(repr, self.preservers.members)) or "none") + ")"

    # -- compressing ----------------------------------------------------------------------------------------------

    def __call__(self, state: KVState, *, strict: bool = True) -> KVState:
        """Compress every row of ``state`` to its budget.

        Rows within budget come back unchanged. Padding is not counted: a padded row comes out as its own unpadded run
        would, behind empty slots (degree 0) where rows differ in length.

        Args:
            state: any KVState, also one that was compressed before.
            strict: True raises BudgetError for a row whose budget cannot hold what must be preserved; False leaves
                such a row as it is (what a growing cache wants: the row fits later).

        Raises:
            NonFiniteError, PositionOrderError: see :meth:`KVState.validate`. The input is never modified.
            BudgetError: see ``strict``.
            RotaryError: a stage compares keys before RoPE and ``state.rotary`` is not set.
            GradientError: keys or values require gradients, and gradients are being recorded. None flow through
                compression: it is for inference, under ``torch.no_grad()``.
            BackendError: a back end was asked for by name that cannot compress such a state.

        Warns:
            BudgetNotMetWarning: the schedule or a threshold stopped before the budget was reached.
        """
        if not isinstance(state, KVState):
            raise ShapeError(
                f"a compressor takes a KVState, got {type(state).__name__}; wrap tensors with "
                "KVState.from_kv(keys, values, mask=None)"
            )
        refuse_gradients("compressing", state.keys, state.values)
        state.validate()
        live = state.live.sum(-1)
        if getattr(self.similarity, "heads", "each") == "mean" and not bool((live == live[:, :1]).all()):
            raise StageError(
                f"{self.similarity!r} makes one decision for all heads, but the heads of a row hold different numbers "
                "of slots (an earlier threshold?); use heads='each'"
            )
        with torch.no_grad(), in_own_types(state.keys.device):
            return map_dense(state, lambda rows: self._compress(rows, strict))

    def _compress(self, state: KVState, strict: bool) -> KVState:
        """One group of rows: no empty slots, the same number of tokens seen."""
        if state.slots == 0 or state.batch == 0 or state.heads == 0:
            return state
        seen = int(state.seen[0])
        budget = self.budget.slots(seen)
        if state.slots <= budget:
            return state
        preserved = self.preservers.select(state, budget)
        count = int(preserved[0, 0].sum())
        try:
            plan = self._plan(state.slots, budget, count)
        except BudgetError:
            if strict:
                raise
            return state
        result = self._rounds(state, ~preserved, plan.sizes)
        if strict and result.slots > budget:
            warnings.warn(
                f"{result.slots} slots are left of {state.slots}, over the budget of {budget}: "
                + (
                    f"{self.schedule!r} ended after {len(plan.sizes)} rounds"
                    if not plan.met and plan.compressible
                    else f"{count} slots are preserved"
                    if not plan.met
                    else f"{self.matching!r} accepted fewer merges"
                ),
                BudgetNotMetWarning,
                stacklevel=5,  # past the closures, to the caller of the compressor
            )
        return result

    def _rounds(self, state: KVState, free: Tensor, sizes: tuple[int, ...]) -> KVState:
        backend, fast = self.runs_on(state.keys.device), self.fast_path
        if backend == "triton" and self.backend == "auto" and not kernels_take(state):
            backend = "reference"
        ready = self.stages.prepare(state, free)
        if isinstance(fast, str) or backend == "reference" or not sizes:
            result = reference_rounds(self.stages, ready, free, sizes)
        else:
            fast_rounds = {"blocked": blocked_rounds, "native": native_rounds, "triton": triton_rounds}
            result = fast_rounds[backend](ready, free, sizes, fast)
        # What stages add for their own use is gone afterwards; importance the caller set is carried on.
        kept = {name: result.slot_data[name] for name in state.slot_data}
        return replace(result, slot_data=kept, head_data=state.head_data)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def stages(self) -> Stages:
        """The stages of a round."""
        return Stages(self.partition, self.similarity, self.matching, self.aggregate)

    @property
    def fast_path(self) -> Settings | str:
        """What fast paths need to know about the stages, or why there is none for them."""
        return settings_of(self.partition, self.similarity, self.matching, self.aggregate)

    def runs_on(self, device: torch.device | str) -> str:
        """The back end that compresses states on ``device``: what "auto" chooses, else the one asked for.

        "auto" takes kernels on GPUs and blocked rounds on the CPU where the stages have them, and carries the stages
        out one by one otherwise (on a GPU also for float64, for keys or values of more than 256 channels, and for keys
        of another type than the values).

        >>> from centroidkv import presets
        >>> presets.centroidkv().runs_on("cpu"), presets.tome().runs_on("cpu")
        ('blocked', 'reference')
        """
        fast, kind = self.fast_path, torch.device(device).type
        if self.backend != "auto":
            return self.backend
        if isinstance(fast, str):
            return "reference"
        if kind == "cpu":
            return "blocked"
        return "triton" if fast.kernels and why_not_triton(device) is None else "reference"

    @property
    def plannable(self) -> bool:
        """Whether sizes are known ahead of the data: no threshold, no plain function as preserver."""
        return bool(getattr(self.matching, "exact", True)) and self.preservers.countable

    @property
    def needs_rotary(self) -> bool:
        """Whether a stage compares or scores keys before RoPE, so that states must carry ``rotary``."""
        stages = (self.matching, *self.preservers.members)
        return (
            getattr(self.similarity, "rope", "after") == "before"
            or self.needs_queries
            or any(getattr(stage, "needs_rotary", False) for stage in stages)
        )

    @property
    def needs_queries(self) -> bool:
        """Whether a stage looks at the model's queries, so that states must carry them (``centroidkv.queries``)."""
        stages = (self.similarity, self.matching, *self.preservers.members)
        return any(getattr(stage, "needs_queries", False) for stage in stages)

    @property
    def pools_heads(self) -> bool:
        """Whether a stage decides for several KV heads together, so that it has to see all heads of a layer."""
        stages = (self.similarity, self.matching, *self.preservers.members)
        return getattr(self.similarity, "heads", "each") == "mean" or any(
            getattr(stage, "pools_heads", False) for stage in stages
        )

    def __repr__(self) -> str:
        preserve = ", ".join(map(repr, self.preservers.members)) or "nothing"
        lines = [("preserve", preserve)]
        lines += [(name, repr(getattr(self, name))) for name in _PARTS]
        lines.append(
            ("backend", self.backend if self.backend != "auto" else f"auto ({self.runs_on('cpu')} on the CPU)")
        )
        return "Compressor(\n" + "".join(f"  {name:<10} = {value}\n" for name, value in lines) + ")"
