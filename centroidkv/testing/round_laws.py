"""What a whole round must do: alternating chunks, cosine, ranking within chunks, degree-weighted mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.matching.bipartite import share_out
from centroidkv.partition import Alternating
from centroidkv.records import Partition
from centroidkv.similarity import Cosine
from centroidkv.state import KVState
from centroidkv.testing.aggregate_laws import MILD
from centroidkv.testing.law import expect
from centroidkv.testing.oracles import chunks_of
from centroidkv.testing.strategies import DTYPES, StateCase, states
from centroidkv.testing.tolerances import score_bound, sum_bound


@dataclass(frozen=True)
class RoundCase:
    """A state, slots per chunk, and how many slots leave (in hundredths of what is possible)."""

    state: StateCase
    chunk_size: int = 8
    percent: int = 50

    def partition(self) -> Partition:
        """The alternating partition of the state's slots."""
        return Alternating(self.chunk_size)(self.state.slots)

    def quotas(self) -> list[int]:
        """How many sources leave each chunk that has targets."""
        partition = self.partition()
        return share_out(
            partition.capacity * self.percent // 100, [size for size in partition.chunk_capacities if size]
        )


rounds = st.builds(
    RoundCase,
    state=st.one_of(
        states(least=1),
        states(least=1, dtypes=("float16",), kinds=MILD),  # which ends at 65504
    ),
    chunk_size=st.integers(2, 20),
    percent=st.integers(0, 100),
)


def run(way: Callable[..., Any], case: RoundCase) -> KVState:
    """The state after a round, done by ``way(keys, values, degree, positions, chunk, quotas)``."""
    state = case.state.state()
    after = way(state.keys, state.values, state.degree, state.positions, case.chunk_size, case.quotas())
    keys, values, degree, positions = after
    return KVState(keys, values, degree, positions, seen=state.seen)


def expect_a_round(case: RoundCase, before: KVState, after: KVState) -> None:
    """Sizes, order, mass, which slots left, and slots that nothing joined."""
    slots, quotas = before.slots - sum(case.quotas()), case.quotas()
    expect(after.slots == slots, f"{slots} slots", after.slots)
    expect(after.keys.dtype == before.keys.dtype, f"keys of {before.keys.dtype}", after.keys.dtype)
    places = after.positions  # a state made from raw keys numbers its slots
    order = (places >= 0).all() and (places < before.slots).all() and (places.diff(dim=-1) > 0).all()
    expect(order, f"ascending positions from 0 to {before.slots - 1}", places.tolist())
    stayed = torch.zeros_like(before.degree, dtype=torch.bool).scatter(-1, places, True)
    chunks = [(sources, targets) for sources, targets in chunks_of(case.partition()) if targets]
    left = (
        [torch.stack([(~head)[sources].sum() for sources, _ in chunks]).tolist() for head in stayed.flatten(0, 1)]
        if chunks
        else []
    )
    expect(all(head == quotas for head in left), f"{quotas} sources of each chunk to leave", left)
    total = after.degree.sum(-1)
    expect(total.equal(before.degree.sum(-1)), f"{before.degree.sum(-1).tolist()} tokens", total.tolist())
    own = before.degree.gather(-1, places)
    expect((after.degree >= own).all(), f"degrees of at least {own.tolist()}", after.degree.tolist())
    alone = after.degree == own
    for name in ("keys", "values"):
        x, y = getattr(before, name), getattr(after, name)
        raw = x.gather(2, places[..., None].expand(*places.shape, x.shape[-1]))
        expect(y[alone].equal(raw[alone]), f"{name} unchanged where nothing joined", lambda y=y: y[alone].tolist())


def expect_the_same_round(case: RoundCase, before: KVState, ours: KVState, theirs: KVState) -> None:
    """Heads in which rounding decides nothing are equal; in the others as good sources leave and sums are kept."""
    storage = DTYPES[case.state.dtype]
    for b, h in itertools.product(range(before.batch), range(before.heads)):
        keys = before.keys[b, h].double()
        scores = Cosine()(keys, keys)
        off = (
            float(score_bound(keys.float(), keys.float(), scores.float(), normalised=True).max()) if len(keys) else 0.0
        )
        gap = abs(_quality(case, scores, ours.positions[b, h]) - _quality(case, scores, theirs.positions[b, h]))
        expect(gap <= off * before.slots, f"slots {theirs.positions[b, h].tolist()}", ours.positions[b, h].tolist())
        clear = all(_clear(*choice, keys, scores, off) for choice in _choices(case))
        for name in ("positions", "degree") if clear else ():
            x, y = getattr(theirs, name)[b, h], getattr(ours, name)[b, h]
            expect(x.equal(y), f"{name} {x.tolist()}", y.tolist())
        for name in ("keys", "values"):
            x, y = (getattr(state, name)[b, h].double() for state in (theirs, ours))
            bound = 2 * sum_bound(getattr(before, name)[b, h].double().abs().amax(0), case.state.slots, storage)
            if not clear:
                x, y = (state.degree[b, h].double() @ part for state, part in ((theirs, x), (ours, y)))
                bound = bound * before.degree[b, h].sum()
            expect(((x - y).abs() <= bound).all(), f"{name} {x.tolist()}", lambda y=y: y.tolist())


def _choices(case: RoundCase) -> Iterator[tuple[list[int], list[int], int]]:
    """Sources, targets and quota of every chunk that has targets."""
    chunks = [(sources, targets) for sources, targets in chunks_of(case.partition()) if targets]
    return ((*sides, quota) for sides, quota in zip(chunks, case.quotas(), strict=True))


def _quality(case: RoundCase, scores: Tensor, places: Tensor) -> float:
    """Sum of the best similarities of the sources that left."""
    stayed = set(places.tolist())
    return sum(
        float(scores[source, targets].max())
        for sources, targets, _ in _choices(case)
        for source in sources
        if source not in stayed
    )


def _clear(sources: list[int], targets: list[int], quota: int, keys: Tensor, scores: Tensor, off: float) -> bool:
    """Whether every decision of a chunk is by more than rounding, or a tie between equal keys, which has a rule."""
    pairs = scores[sources][:, targets]
    best = pairs.amax(-1)
    for row, source in enumerate(sources):
        rivals = keys[[target for column, target in enumerate(targets) if pairs[row, column] >= best[row] - 2 * off]]
        if bool((rivals != rivals[0]).any()) and bool(keys[source].any()):
            return False
    ranked = best.sort(descending=True).values
    if not 0 < quota < len(sources) or ranked[quota - 1] - ranked[quota] > 2 * off:
        return True
    near = [source for row, source in enumerate(sources) if abs(best[row] - ranked[quota]) <= 2 * off]
    near += [source for row, source in enumerate(sources) if abs(best[row] - ranked[quota - 1]) <= 2 * off]
    return not bool((keys[near] != keys[near[0]]).any())
