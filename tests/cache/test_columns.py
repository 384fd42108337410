"""The record of padding: grows with the tokens, moves with the rows, survives JSON."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from centroidkv.cache.clock import RowClock
from centroidkv.cache.columns import Columns

steps = st.lists(
    st.one_of(st.none(), st.lists(st.booleans(), min_size=2, max_size=10).filter(lambda x: len(x) % 2 == 0)), max_size=6
)


def by_hand(pieces):
    """The columns of two rows as lists of "is padding", and the record made piece by piece."""
    rows, record, seen = [[], []], Columns(), 0
    for piece in pieces:
        real = None if piece is None else torch.tensor(piece).view(2, -1)
        length = 3 if real is None else real.shape[1]
        record = record.add(real, seen)
        for row in range(2):
            rows[row] += [False] * length if real is None else (~real[row]).tolist()
        seen += length
    return rows, record, seen


def told(record, first, last):
    part = record.between(first, last)
    return [[False] * (last - first)] * 2 if part is None else part.tolist()


@given(steps, st.integers(0, 40), st.integers(0, 40))
def test_every_column_is_remembered(pieces, a, b):
    rows, record, seen = by_hand(pieces)
    first, last = sorted((min(a, seen), min(b, seen)))
    assert told(record, first, last) == [row[first:last] for row in rows]
    assert told(record.until(first), 0, first) == [row[:first] for row in rows]
    swapped = record.rows(torch.tensor([1, 0]))
    assert told(swapped, 0, seen) == rows[::-1]
    again = Columns.from_runs(json.loads(json.dumps(record.to_runs())))
    assert told(again, 0, seen) == rows
    inner = any(not row[i] and any(row[i:]) for row in rows for i in range(len(row)))
    assert record.inner == again.inner == inner


def test_a_clock_counts_real_tokens_and_a_crop_counts_columns():
    clock = RowClock(seen=10, live=5, since=0, events=1).after(tokens=2, columns=6)
    assert (clock.seen, clock.live, clock.since, clock.columns) == (12, 7, 2, 6)
    back = clock.after(tokens=-1, columns=-4)
    assert (back.since, back.columns) == (1, 2)
    now = clock.at_event(6, merged=True)
    assert (now.since, now.columns, now.events) == (0, 0, 2)
