"""Laws of partitions."""

from __future__ import annotations

from itertools import pairwise
from numbers import Integral
from typing import Any

from hypothesis import strategies as st

from centroidkv.protocols import split_slots
from centroidkv.testing.law import check_all, expect, law
from centroidkv.testing.memory import expect_no_memory
from centroidkv.testing.oracles import chunks_of

lengths = st.integers(0, 8) | st.integers(0, 60) | st.integers(0, 3000)
EVERY = (*range(300), *(2**k + d for k in range(9, 14) for d in (-1, 0, 1)), 20_000, 70_001)
"""Always tried: all short lengths, those around powers of two, and long ones."""


@law("sources and targets are disjoint and lie in 0..n-1", lengths, always=EVERY)
def names_no_slot_twice(partitioner: Any, length: int) -> None:
    partition = split_slots(partitioner, length)
    named = [slot for sources, targets in chunks_of(partition) for slot in (*sources, *targets)]
    expect(len(set(named)) == len(named), "every slot at most once", named)
    expect(all(0 <= slot < length for slot in named), f"slots of 0..{length - 1}", named)


@law("chunks are stretches of neighbours: none reaches into another", lengths, always=EVERY)
def chunks_do_not_interleave(partitioner: Any, length: int) -> None:
    spans = sorted((min(s + t), max(s + t)) for s, t in chunks_of(split_slots(partitioner, length)) if s + t)
    expect(all(a[1] < b[0] for a, b in pairwise(spans)), "stretches one after the other", spans)


@law("a sequence of two or more slots has something to merge, and one round takes at most half", lengths, always=EVERY)
def capacity_is_positive_and_at_most_half(partitioner: Any, length: int) -> None:
    capacity = split_slots(partitioner, length).capacity
    low = 1 if length >= 2 else 0
    expect(low <= capacity <= length // 2, f"a capacity in {low}..{length // 2}", capacity)


@law(
    "the longer the sequence, the more of it can merge: no bound is left in",
    st.integers(60, 2000),
    always=(64, 128, 256, 512, 1024, 2048, 8192),
)
def long_sequences_merge_too(partitioner: Any, length: int) -> None:
    short, long = (split_slots(partitioner, n).capacity for n in (length, 8 * length))
    expect(long > short, f"{8 * length} slots to allow more merges than {length} do, which is {short}", long)


@law("capacity(n), where a class has it, is a whole number and what partition(n) has", lengths, first=EVERY)
def declared_capacity_is_the_partitions(partitioner: Any, length: int) -> None:
    capacity = declared_capacity(partitioner)
    if capacity is None:
        return
    before = capacity(length)
    wanted = split_slots(partitioner, length).capacity
    whole = isinstance(before, Integral) and not isinstance(before, bool)
    expect(whole and before == wanted, f"capacity({length}) = {wanted}", before)
    expect(capacity(length) == before, f"{before} again", lambda: capacity(length))


def declared_capacity(partitioner: Any) -> Any:
    """The capacity that plans ask instead of the partition: the class's own, not an inherited one."""
    return partitioner.capacity if "capacity" in vars(type(partitioner)) else None


def _ask(partitioner: Any, length: int) -> Any:
    capacity = declared_capacity(partitioner)
    return chunks_of(split_slots(partitioner, length)), None if capacity is None else capacity(length)


@law(
    "the split is a pure function of the length, whatever was split before; no global random state is read or moved",
    st.lists(lengths, min_size=1, max_size=6),
    first=((10, 301, 3, 2100, 0, 10, 7, 256), (2100, 9, 600)),  # longest so far: of either parity
)
def is_pure(partitioner: Any, several: Any) -> None:
    expect_no_memory(partitioner, _ask, several)


PARTITION_LAWS = (
    is_pure,
    names_no_slot_twice,
    chunks_do_not_interleave,
    capacity_is_positive_and_at_most_half,
    long_sequences_merge_too,
    declared_capacity_is_the_partitions,
)


def check_partition(partitioner: Any, examples: int | None = None) -> None:
    """Check a partitioner against every law of its family; raises LawViolation.

    Slots may be left in neither side (they are kept); what is declared by ``capacity`` is held to what is split.

    >>> from centroidkv.partition import Alternating
    >>> check_partition(Alternating(chunk_size=6), examples=10)
    """
    check_all(PARTITION_LAWS, partitioner, examples)
