"""Laws of a cache's layers: however it holds its slots, a layer shows in every step what a run by hand shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from centroidkv.cache import LayerState
from centroidkv.compressor import Compressor
from centroidkv.errors import CacheError
from centroidkv.matching import BipartiteSoftMatching
from centroidkv.partition import Alternating
from centroidkv.preserve import Recent, Sinks
from centroidkv.records import Assignment, Budget
from centroidkv.state import KVState
from centroidkv.testing.by_hand import ByHand
from centroidkv.testing.law import check_all, expect, expect_same, given_that, law

CLOSE = 1e-5
"""Rows computed together may differ from a row alone by rounding."""


@dataclass(frozen=True)
class LayerCase:
    """The life of a layer in one line.

    Args:
        pieces: tokens per append.
        batch: rows.
        pad: padding in front of the last row's first piece.
        budget: slots to keep.
        interval: tokens between two compressions.
        at: the piece before which something happens, if the law makes something happen.
    """

    pieces: tuple[int, ...]
    batch: int = 1
    pad: int = 0
    budget: int = 8
    interval: int = 4
    at: int = 0
    seed: int = 0

    @property
    def compressor(self) -> Compressor:
        """One that preserves little, for short lives."""
        builder = Compressor.builder().preserve(Sinks(1), Recent(2)).partition(Alternating(8))
        return builder.budget(Budget.tokens(self.budget)).build()

    def tokens(self) -> list[tuple[Tensor, Tensor]]:
        """Keys ``[B, 2, n, 4]`` and values ``[B, 2, n, 3]`` of every piece."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = (4, 3)
        pieces = [[torch.randn(self.batch, 2, n, size, generator=generator) for size in sizes] for n in self.pieces]
        return [(keys, values) for keys, values in pieces]

    def real(self, piece: int) -> Tensor | None:
        """Which tokens of a piece are no padding; None: all."""
        if piece or not self.pad:
            return None
        mask = torch.ones(self.batch, self.pieces[0], dtype=torch.bool)
        mask[-1, : self.pad] = False
        return mask


@st.composite
def lives(draw: Callable[..., Any]) -> LayerCase:
    """Lives that begin with a prompt, most of them longer than the budget."""
    prompt = draw(st.integers(1, 30))
    pieces = (prompt, *draw(st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=14)))
    return LayerCase(
        pieces,
        batch=draw(st.integers(1, 3)),
        pad=draw(st.sampled_from([0, 0, prompt // 2, max(prompt - 1, 0)])),
        budget=draw(st.integers(5, 16)),
        interval=draw(st.integers(1, 6)),
        at=draw(st.integers(1, len(pieces) - 1)),
        seed=draw(st.integers(0, 999)),
    )


LONG = (LayerCase((300, *[1] * 40), batch=2, pad=140, budget=64, interval=16, at=20),)
"""Always tried: longer than what buffers have to spare."""


Make = Callable[[Compressor, int], LayerState]


@dataclass(frozen=True)
class Layered:
    """What makes a layer of a compressor and an interval."""

    make: Make

    def __repr__(self) -> str:
        return getattr(self.make, "__name__", repr(self.make))


class Life:
    """A layer and its rows by hand, side by side."""

    def __init__(self, layered: Layered, case: LayerCase, compressor: Compressor | None = None) -> None:
        compressor = compressor or case.compressor
        self.case, self.layer = case, layered.make(compressor, case.interval)
        self.rows = [ByHand(compressor, case.interval) for _ in range(case.batch)]

    def append(self, piece: int, keys: Tensor, values: Tensor) -> None:
        """Give both the same tokens, and compare what they show."""
        real = self.case.real(piece)
        shown_keys, shown_values, degree = self.layer.append(keys, values, real, None, True)
        expect(degree is not None, "degrees, as they were asked for", None)
        for row, by_hand in enumerate(self.rows):
            mine = slice(None) if real is None else real[row]
            new = keys[row : row + 1, :, mine]
            wanted = by_hand.append(new, values[row : row + 1, :, mine], keys.shape[2] - new.shape[2])
            assert degree is not None  # expected above
            _expect_shown(shown_keys[row], shown_values[row], degree[row], wanted, f"row {row} in piece {piece}")

    def compare(self, when: str) -> None:
        """Compare what both hold."""
        state = self.layer.state
        expect(state is not None, "a state", None)
        assert state is not None  # expected above
        for row, by_hand in enumerate(self.rows):
            what = f"row {row} {when}"
            _expect_shown(state.keys[row], state.values[row], state.degree[row], by_hand.state, what)
            expect(int(state.seen[row]) == by_hand.seen, f"{by_hand.seen} tokens seen in {what}", int(state.seen[row]))


def _expect_shown(keys: Tensor, values: Tensor, degree: Tensor, wanted: KVState | None, what: str) -> None:
    live = degree > 0
    slots = 0 if wanted is None else wanted.slots
    expect(bool((live.sum(-1) == slots).all()), f"{slots} slots in every head of {what}", live.sum(-1).tolist())
    if wanted is None:
        return
    for name, x in (("keys", keys), ("values", values), ("degree", degree)):
        own = getattr(wanted, name)[0]
        expect_same(x[live].view(own.shape), own, f"{name} of {what}", CLOSE if x.ndim == 3 else None)


@law("every step shows what a run by hand shows, in every row as if it were alone", lives(), always=LONG)
def shows_what_a_run_by_hand_shows(layered: Layered, case: LayerCase) -> None:
    life = Life(layered, case)
    for piece, (keys, values) in enumerate(case.tokens()):
        life.append(piece, keys, values)
        life.compare(f"after piece {piece}")


@law("rows that are kept, repeated or permuted take everything along", lives(), always=LONG)
def rows_move_with_all_they_have(layered: Layered, case: LayerCase) -> None:
    order = torch.tensor([case.batch - 1, *range(case.batch)])
    life = Life(layered, case)
    for piece, (keys, values) in enumerate(case.tokens()):
        if piece == case.at:
            life.layer.reorder(order)
            life.rows = [replace(life.rows[row]) for row in order.tolist()]
            life.compare("after a reorder")
        if piece >= case.at:
            keys, values = keys[order], values[order]
        life.append(piece, keys, values)
    life.compare("at the end")


@law("a crop takes back the newest tokens without a trace, or is refused and changes nothing", lives(),
     always=(*LONG, LayerCase((3, 1), pad=1, at=1, seed=2)))  # fmt: skip
def a_crop_leaves_no_trace(layered: Layered, case: LayerCase) -> None:
    life = Life(layered, case)
    tokens = case.tokens()
    for piece, (keys, values) in enumerate(tokens):
        if piece == case.at:
            wanted = 1 + case.seed % 3
            given_that(wanted <= sum(case.pieces[:piece]))
            fresh = min(row.fresh for row in life.rows)
            try:
                life.layer.crop(wanted)
            except CacheError as error:
                # A row's slots may have moved for another row's sake, when that was compressed.
                moved = case.batch > 1 and life.layer.events
                expect(wanted > fresh or moved, f"the last {wanted} of {fresh} columns to be taken back", error)
            else:
                expect(wanted <= fresh, f"a refusal: only {fresh} columns are not clustered yet", "none")
                for row in life.rows:
                    row.crop(wanted)
            life.compare("after a crop")
        life.append(piece, keys, values)


@dataclass
class Armed:
    """Matches as usual, or raises; ``raised`` counts."""

    armed: bool = False
    raised: list[int] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> Assignment:
        if self.armed:
            self.raised.append(1)
            raise ArithmeticError("this compression was to fail")
        return BipartiteSoftMatching()(*arguments)


@law("an error of the compressor changes nothing: the same step can be taken again", lives(), always=LONG)
def an_error_changes_nothing(layered: Layered, case: LayerCase) -> None:
    matcher = Armed()
    life = Life(layered, case, case.compressor.with_(matching=matcher))
    for piece, (keys, values) in enumerate(case.tokens()):
        if piece >= case.at and not matcher.raised:
            before = life.layer.logical, life.layer.physical, life.layer.events
            matcher.armed = True
            try:
                life.layer.append(keys, values, case.real(piece), None, True)
            except ArithmeticError:
                matcher.armed = False
                now = life.layer.logical, life.layer.physical, life.layer.events
                expect(now == before, f"columns, slots and events {before}", now)
                life.compare("after an error")
            else:
                given_that(False)  # nothing was due, and the step was taken: another life shows more
        life.append(piece, keys, values)


@law("a layer counts columns, slots and bytes, and forgets all of them", lives(), always=LONG)
def counts_what_it_holds(layered: Layered, case: LayerCase) -> None:
    life = Life(layered, case)
    for piece, ((keys, values), columns_seen) in enumerate(zip(case.tokens(), accumulate(case.pieces), strict=True)):
        life.append(piece, keys, values)
        layer, state = life.layer, life.layer.state
        assert state is not None  # by the law above
        expect(layer.logical == columns_seen, f"{columns_seen} columns", layer.logical)
        expect(layer.physical == state.slots, f"{state.slots} slots", layer.physical)
        expect(layer.events == max(row.events for row in life.rows), "the events of the row with most", layer.events)
        expect(layer.nbytes > 0, "some bytes", layer.nbytes)
        whole = case.batch * 2 * columns_seen * (4 + 3) * 4
        expect(layer.nbytes_full == whole, f"{whole} bytes, had nothing been compressed", layer.nbytes_full)
    life.layer.clear()
    left = (life.layer.state, life.layer.like, life.layer.logical, life.layer.nbytes, life.layer.events)
    expect(left == (None, None, 0, 0, 0), "nothing after clear()", left)
    life.rows = [ByHand(row.compressor, row.interval) for row in life.rows]
    life.append(0, *case.tokens()[0])


LAYER_LAWS = (
    shows_what_a_run_by_hand_shows,
    rows_move_with_all_they_have,
    a_crop_leaves_no_trace,
    an_error_changes_nothing,
    counts_what_it_holds,
)


def check_layer(make: Make, examples: int | None = None) -> None:
    """Check a cache's layer against every law of its family.

    Args:
        make: (compressor, interval) -> a new layer (:class:`~centroidkv.cache.LayerState`), which gives back what it
            holds exactly.
        examples: tries per law.

    >>> from centroidkv.cache import GrowingState
    >>> check_layer(GrowingState, examples=3)
    """
    check_all(LAYER_LAWS, Layered(make), examples)
