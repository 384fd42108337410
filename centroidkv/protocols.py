"""What a stage must offer: one Protocol per family.

Any object that fits is a stage; nothing is registered and nothing is subclassed. Where a plain function is enough the
protocol is a call signature, so a lambda fits too. Optional attributes declare capabilities and are read with a
default, so a small stage need not mention them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from centroidkv.errors import StageError
from centroidkv.records import Assignment, Partition
from centroidkv.state import KVState
from centroidkv.traits import MatcherTraits

__all__ = [
    "Aggregator",
    "Allocation",
    "Matcher",
    "Partitioner",
    "Preserver",
    "Schedule",
    "Similarity",
]


@runtime_checkable
class Preserver(Protocol):
    """Chooses slots that are set aside before clustering and stay bit-identical.

    Instead of a class, a plain function ``state -> mask [B, H, T]`` also serves; every (row, head) must then mark the
    same number of slots, and plans cannot be made ahead of the data.
    """

    @property
    def share(self) -> float | None:
        """Share of the free budget it takes (the budget less all fixed counts), or None for a fixed count."""
        ...

    def count(self, free_budget: int) -> int:
        """How many slots it wants; a fixed preserver ignores ``free_budget``."""
        ...

    def select(self, state: KVState, free: Tensor, count: int) -> Tensor:
        """A mask ``[B, H, T]`` with exactly ``count`` slots of ``free [B, H, T]`` set in every (row, head)."""
        ...


@runtime_checkable
class Partitioner(Protocol):
    """Splits ``length`` slots into sources and targets: a pure function of the length.

    May return a :class:`Partition` or simply a pair ``(sources, targets)`` of index lists. A class may have
    ``capacity(length)``, which must equal ``partition(length).capacity``; plans ask it instead.
    """

    def __call__(self, length: int, /) -> Partition: ...


@runtime_checkable
class Similarity(Protocol):
    """Scores all pairs: ``a [..., m, D]``, ``b [..., n, D]`` (float32) -> ``[..., m, n]``, larger = more alike.

    Optional attributes: ``rope`` ("after", the default: keys as cached; "before": keys un-rotated by their positions)
    and ``heads`` ("each", the default: every KV head decides for itself; "mean": one decision on head-mean keys).
    Instead of ``rope``, ``features(state) -> [B, H, T, F]`` gives the points that are compared in place of keys.

    Similarities and matchers may have ``prepare(state, free) -> state``, called once per compression with the slots
    that may merge: what it adds to ``slot_data`` and ``head_data`` is there in every round and gone afterwards, unless
    its :class:`~centroidkv.slot_data.SlotDatum` says that it lasts.
    ``needs_queries`` (default False) asks callers for the model's queries (:mod:`centroidkv.queries`). Any stage whose
    decisions for one head depend on the other heads says ``pools_heads = True`` (default False; heads="mean" does).
    """

    def __call__(self, a: Tensor, b: Tensor, /) -> Tensor: ...


@runtime_checkable
class Matcher(Protocol):
    """Decides which slots join which: at most ``edges`` slots leave, each for a slot that stays.

    ``keys [B, H, T, D]`` are float32 and prepared as the similarity declares; ``degree [B, H, T]`` is their mass.
    Optional attributes: ``needs_partition`` (default True; False: works on all slots), ``capacity(length)`` for those
    (the most slots one round can remove; default all but one), ``evicts`` (default False; True: removed slots join
    nothing), ``exact`` (default True; False: may remove fewer than ``edges``), ``mass`` (default None; the name of slot
    data to be given in place of degrees).
    """

    def __call__(
        self, keys: Tensor, degree: Tensor, partition: Partition, similarity: Similarity, edges: int, /
    ) -> Assignment: ...


@runtime_checkable
class Aggregator(Protocol):
    """Carries an assignment out: the merged keys, values and degrees of the slots that stay.

    Returns a state of the *same* T in which slots that left are ignored; the compressor drops them. Slots that nothing
    joined must come out bit-identical.
    """

    def __call__(self, state: KVState, assignment: Assignment, /) -> KVState: ...


@runtime_checkable
class Schedule(Protocol):
    """The rate of round j = 0, 1, ...: the share of compressible slots it is to remove, in [0, 1]; 0 ends the run.

    A round never removes more than its matcher can: half of the slots for a bipartite one.
    """

    def __call__(self, round_index: int, /) -> float: ...


@runtime_checkable
class Allocation(Protocol):
    """How layers share the budget: one share per compressed layer, positive, with a mean of 1.

    ``depths``: where in the model each of them lies, (i + 1/2) / n for layer i of n. What gives every layer the same
    may say so by an attribute ``even = True``; it then serves where layers must be alike.
    """

    def __call__(self, depths: Sequence[float], /) -> Sequence[float]: ...


def split_slots(partitioner: Any, length: int) -> Partition:
    """What ``partitioner`` makes of ``length`` slots, also if it returns a plain pair of index lists.

    Raises:
        StageError: it returned neither, or split another number of slots.
    """
    partition = partitioner(length)
    if not isinstance(partition, Partition):
        try:
            sources, targets = partition
        except (TypeError, ValueError):
            raise StageError(
                f"{partitioner!r} must return a Partition or a pair (sources, targets), got {partition!r}"
            ) from None
        partition = Partition.whole(sources, targets, length)
    if partition.length != length:
        raise StageError(f"{partitioner!r} was asked to split {length} slots, it split {partition.length}")
    return partition


def matcher_capacity(matcher: Any, partition: Partition) -> int:
    """The most slots that one round of ``matcher`` can remove, by the capabilities it declares."""
    said = MatcherTraits.of(matcher)
    if said.needs_partition:
        return partition.capacity
    return max(partition.length - 1, 0) if said.capacity is None else said.capacity(partition.length)


def check_assignment(matcher: Any, assignment: Assignment, edges: int) -> None:
    """Hold a matcher to what it was asked for and what it declares.

    Raises:
        StageError: it removed another number of slots than ``edges``, or evicts without saying so.
    """
    left = (~assignment.stays).sum(-1)
    said = MatcherTraits.of(matcher)
    exact = said.exact
    if not bool((left == edges).all() if exact else (left <= edges).all()):
        raise StageError(
            f"{matcher!r} was asked to remove {'exactly' if exact else 'at most'} {edges} of "
            f"{assignment.joins.shape[-1]} slots per head, it removed {int(left.min())} to {int(left.max())}"
            + ("; declare `exact = False` if it may remove fewer" if exact else "")
        )
    if not said.evicts and bool(assignment.evicted.any()):
        raise StageError(f"{matcher!r} evicts slots without saying so; declare `evicts = True` if it means to")
