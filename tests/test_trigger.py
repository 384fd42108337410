"""When to compress, against tables written by hand."""

from __future__ import annotations

import pytest

from centroidkv import Budget, presets
from centroidkv.cache import FixedState, GrowingState
from centroidkv.errors import StageError
from centroidkv.paged.plan import ServingPlan
from centroidkv.preserve import Recent
from centroidkv.trigger import OverBudget, PromptEnd


def trigger(budget=100, interval=16, recent=0):
    return OverBudget(presets.centroidkv(Budget.tokens(budget)).with_(preserve=[Recent(recent)]), interval)


@pytest.mark.parametrize(
    ("seen", "slots", "since", "events", "due"),
    [
        (100, 100, 100, 0, False),  # at the budget
        (101, 101, 101, 0, True),  # the first token over it
        (101, 101, 0, 0, True),  # the interval counts from the first compression on
        (300, 101, 15, 1, False),
        (300, 101, 16, 1, True),
        (300, 100, 99, 1, False),  # nothing to do, however long ago
        (300, 101, 99, 7, True),
    ],
)
def test_over_budget(seen, slots, since, events, due):
    assert trigger().due(seen, slots, since, events) is due


def test_over_budget_waits_until_the_budget_holds_what_is_preserved():
    shares = OverBudget(presets.centroidkv(Budget.ratio(0.5)).with_(preserve=[Recent(32)]), 1)
    # Half of 64 tokens are the 32 preserved slots: no centroid fits beside them. Of 66 one does.
    assert [shares.due(seen, seen) for seen in (63, 64, 65, 66)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("slots", "since", "events", "wait"),
    [(90, 0, 0, 11), (100, 5, 0, 1), (90, 5, 1, 11), (99, 5, 1, 11), (100, 16, 1, 1)],
)
def test_nothing_is_due_before_the_wait_is_over(slots, since, events, wait):
    asked = trigger()
    assert asked.wait(slots, since, events) == wait
    due = [asked.due(500, slots + n, since + n, events) for n in range(1, wait + 1)]
    assert due == [False] * (wait - 1) + [True]


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, None, "8"])
@pytest.mark.parametrize("make", [PromptEnd, lambda interval: OverBudget(presets.quick(0.5), interval)])
def test_an_interval_is_a_whole_number_of_tokens(make, interval):
    with pytest.raises(StageError, match=f"interval.*got {interval!r}"):
        make(interval)


def test_prompt_end():
    asked = PromptEnd(10)
    assert [n for n in range(60) if asked.due(25, n)] == [25, 35, 45, 55]
    assert [asked.moments(25, n) for n in (0, 24, 25, 34, 35, 59)] == [0, 0, 1, 1, 2, 4]
    assert [asked.tokens(25, number) for number in (1, 2, 5)] == [25, 35, 65]


def test_every_engine_goes_by_one_of_them():
    compressor = presets.quick(Budget.tokens(128))
    assert GrowingState(compressor, 8).trigger == FixedState(compressor, 8).trigger == OverBudget(compressor, 8)
    assert ServingPlan(compressor, 16, 8).trigger == PromptEnd(8)
