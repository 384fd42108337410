"""Compressor: the assembled stages. Takes a KVState, returns a KVState."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from centroidkv.allocation import Even, spread
from centroidkv.assembly import CALLED, as_preservers, check_backend, check_part
from centroidkv.builder import Builder
from centroidkv.dense import map_dense
from centroidkv.errors import BudgetError, BudgetNotMetWarning, ShapeError, StageError
from centroidkv.guards import in_own_types, on_own_devices, refuse_gradients
from centroidkv.preserve.union import Union
from centroidkv.protocols import Aggregator, Allocation, Matcher, Partitioner, Schedule, Similarity
from centroidkv.records import Budget, Plan
from centroidkv.rounds import ORDERS, Stages, reasons, run_first
from centroidkv.schedule import plan_sizes
from centroidkv.state import KVState
from centroidkv.traits import AllocationTraits, LookingTraits, MatcherTraits, SimilarityTraits

EVEN = Even()
_PARTS = ("partition", "similarity", "matching", "aggregate", "schedule", "budget", "allocation")


@dataclass(frozen=True)
class Compressor:
    """Preserve, then rounds of partition -> similarity -> matching -> aggregate, as the schedule and budget say.

    Build one with :meth:`builder` or take one from :mod:`centroidkv.presets`. A compressor holds no state: the same
    input gives the same output, bit for bit on one device, and one object serves all layers and sequences. A call
    takes the budget as it is; a cache or a press, which has several layers, asks :meth:`for_layers` first. However a
    compressor is made, it checks its parts: StageError, BudgetError and BackendError as of :meth:`Builder.build`.

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

    def __post_init__(self) -> None:
        for name in CALLED:
            check_part(name, getattr(self, name))
        # Frozen for everyone else: a list of preservers or a plain number are brought into their form here.
        object.__setattr__(self, "preservers", as_preservers(self.preservers))
        object.__setattr__(self, "budget", Budget.of(self.budget))
        check_backend(self.backend, self.stages)
        self.preservers.check_budget(self.budget, evicts=self.evicts)

    @staticmethod
    def builder() -> Builder[Compressor]:
        """A :class:`~centroidkv.builder.Builder` with the paper's method as its default parts."""
        return Builder(lambda preserve, **parts: Compressor(preservers=preserve, **parts))

    def with_(self, **parts: Any) -> Compressor:
        """The same compressor with some parts replaced: any of the builder's, by the same names, and ``backend``.

        >>> from centroidkv import presets
        >>> from centroidkv.matching import Evict
        >>> presets.centroidkv(0.25).with_(matching=Evict(), budget=0.5).budget
        Budget.ratio(0.5)

        Raises what :meth:`Builder.build` raises, and StageError if no part is called so.
        """
        names = ("preserve", *_PARTS, "backend")
        if unknown := sorted(parts.keys() - set(names)):
            raise StageError(f"a compressor has no part {', '.join(map(repr, unknown))}; its parts are {names}")
        if "preserve" in parts:
            parts["preservers"] = parts.pop("preserve")
        return replace(self, **parts)

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
        return [self.with_(budget=b, allocation=EVEN) for b in spread(self.budget, self.allocation, depths)]

    @cached_property
    def even(self) -> bool:
        """Whether all layers get the same budget, as the allocation's attribute ``even`` says."""
        return bool(AllocationTraits.of(self.allocation).even)

    def fits(self, tokens: int, slots: int | None = None, budget: Budget | None = None) -> bool:
        """Whether the budget of such a row leaves room beyond what must be preserved (cheaper than a plan).

        Of another ``budget`` if given. True as well where only the data can tell: a preserver is a plain function.
        """
        slots = tokens if slots is None else slots
        room = (self.budget if budget is None else budget).slots(tokens)
        if not self.preservers.countable:
            return True
        preserved = self.preservers.count(slots, room)
        return preserved < slots and room - preserved >= (not self.evicts)

    @cached_property
    def evicts(self) -> bool:
        """Whether slots leave without joining others. A budget must else leave room for one centroid at least."""
        return bool(MatcherTraits.of(self.matching).evicts)

    def _plan(self, slots: int, budget: int, preserved: int) -> Plan:
        room, least = budget - preserved, int(not self.evicts)
        if preserved < slots and room < least:
            raise BudgetError(
                f"a budget of {budget} slots ({self.budget!r}) cannot hold the {preserved} preserved slots "
                f"({' + '.join(map(repr, self.preservers.members)) or 'none'})"
                f"{' and at least one centroid' if least else ''} of a row with {slots} slots; raise the budget to at "
                f"least {preserved + least}, or preserve less"
            )
        return Plan(slots, budget, preserved, plan_sizes(self.schedule, slots - preserved, room, self.stages.capacity))

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
        if SimilarityTraits.of(self.similarity).heads == "mean" and not bool((live == live[:, :1]).all()):
            raise StageError(
                f"{self.similarity!r} makes one decision for all heads, but the heads of a row hold different numbers "
                "of slots (an earlier threshold?); use heads='each'"
            )
        with torch.no_grad(), in_own_types(state.keys.device), on_own_devices():
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
        if not sizes:
            return state
        result = run_first(ORDERS[self.backend], self.stages, self.stages.prepare(state, free), free, sizes)
        # What stages add for their own use is gone afterwards, unless it is to last; what the caller set is carried on.
        kept = {name: x for name, x in result.slot_data.items() if name in state.slot_data or result.rule(name).lasting}
        rules = {name: rule for name, rule in result.slot_rules.items() if name in kept}
        return replace(result, slot_data=kept, slot_rules=rules, head_data=state.head_data)

    # -- what it is -----------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> Stages:
        """The stages of a round."""
        return Stages(self.partition, self.similarity, self.matching, self.aggregate)

    def runs_on(self, place: torch.device | str | KVState) -> str:
        """The back end that compresses states on a device, or this state: the first that can, or what was asked for.

        >>> from centroidkv import presets
        >>> presets.centroidkv().runs_on("cpu"), presets.tome().runs_on("cpu")
        ('blocked', 'reference')
        """
        order = ORDERS[self.backend]
        return order[min(len(self.why_not(place)), len(order) - 1)].name

    def why_not(self, place: torch.device | str | KVState) -> dict[str, str]:
        """Why the back ends that come before :meth:`runs_on`'s answer are passed over on a device, or for this state.

        >>> from centroidkv import presets
        >>> presets.tome().why_not("cpu")["blocked"]
        'fast paths pair neighbours inside chunks of a fixed size, not by Alternating(chunk_size=None)'
        """
        return reasons(ORDERS[self.backend], self.stages, place if isinstance(place, KVState) else torch.device(place))

    @cached_property
    def plannable(self) -> bool:
        """Whether sizes are known ahead of the data: no threshold, no plain function as preserver."""
        return bool(MatcherTraits.of(self.matching).exact) and self.preservers.countable

    @cached_property
    def needs_rotary(self) -> bool:
        """Whether a stage compares or scores keys before RoPE, so that states must carry ``rotary``."""
        before = SimilarityTraits.of(self.similarity).rope == "before"
        return before or self.needs_queries or any(said.needs_rotary for said in self._looking)

    @cached_property
    def needs_queries(self) -> bool:
        """Whether a stage looks at the model's queries, so that states must carry them (``centroidkv.queries``)."""
        return any(said.needs_queries for said in self._looking)

    @cached_property
    def pools_heads(self) -> bool:
        """Whether a stage decides for several KV heads together, so that it has to see all heads of a layer."""
        return self.one_decision or any(said.pools_heads for said in self._looking)

    @cached_property
    def one_decision(self) -> bool:
        """Whether all heads of a layer merge the same slots."""
        return SimilarityTraits.of(self.similarity).heads == "mean"

    @cached_property
    def _looking(self) -> list[LookingTraits]:
        return [LookingTraits.of(stage) for stage in (self.similarity, self.matching, *self.preservers.members)]

    def __repr__(self) -> str:
        preserve = ", ".join(map(repr, self.preservers.members)) or "nothing"
        lines = [("preserve", preserve)]
        lines += [(name, repr(getattr(self, name))) for name in _PARTS]
        lines.append(
            ("backend", self.backend if self.backend != "auto" else f"auto ({self.runs_on('cpu')} on the CPU)")
        )
        return "Compressor(\n" + "".join(f"  {name:<10} = {value}\n" for name, value in lines) + ")"
