"""Make a failing case smaller while it still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tools.fuzz.draw import Case


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found in ``seconds`` for which ``fails`` holds, as it does for ``case``.

    Fewer operations, then options left at their defaults, then arguments left at theirs, then smaller numbers; again
    from the start as long as anything helped.
    """
    end = time.monotonic() + seconds

    def still(smaller: Case) -> bool:
        return time.monotonic() < end and fails(smaller)

    before = None
    while case != before and time.monotonic() < end:
        before = case
        case = _without_operations(case, still)
        case = _without_options(case, still)
        case = _without_arguments(case, still)
        case = _with_smaller_numbers(case, still)
    return case


def _fewer(items: Sequence[Any], still: Callable[[list[Any]], bool]) -> list[Any]:
    """``items`` without as many as can be spared: first all of them, then halves, quarters, and so on, from the end."""
    items, size = list(items), len(items)
    while size:
        stop = len(items)
        while stop > 0:
            left = items[: max(stop - size, 0)] + items[stop:]
            if still(left):
                items = left
            stop -= size
        size //= 2
    return items


def _without_operations(case: Case, still: Callable[[Case], bool]) -> Case:
    def with_these(operations: list[Any]) -> Case:
        return replace(case, operations=tuple(operations))

    return with_these(_fewer(case.operations, lambda left: still(with_these(left))))


def _without_options(case: Case, still: Callable[[Case], bool]) -> Case:
    def with_these(options: list[Any]) -> Case:
        return replace(case, options=dict(options))

    return with_these(_fewer(list(case.options.items()), lambda left: still(with_these(left))))


def _without_arguments(case: Case, still: Callable[[Case], bool]) -> Case:
    def with_these(given: list[tuple[int, str]]) -> Case:
        operations = [
            (name, {k: v for k, v in arguments.items() if (place, k) in given})
            for place, (name, arguments) in enumerate(case.operations)
        ]
        return replace(case, operations=tuple(operations))

    every = [(place, name) for place, (_, arguments) in enumerate(case.operations) for name in arguments]
    return with_these(_fewer(every, lambda left: still(with_these(left))))


def _with_smaller_numbers(case: Case, still: Callable[[Case], bool]) -> Case:
    places: list[tuple[int | None, str]] = [(None, name) for name in case.options]
    places += [(i, name) for i, (_, arguments) in enumerate(case.operations) for name in arguments]
    for place, name in places:
        again = True
        while again:
            again = False
            given = case.options if place is None else case.operations[place][1]
            for value in _smaller(given[name]):
                smaller = _with(case, place, name, value)
                if still(smaller):
                    case, again = smaller, True
                    break
    return case


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int) and value > 0:
        yield from (n for n in dict.fromkeys((0, value // 2, value - value // 4, value - 1)) if n < value)
    elif isinstance(value, tuple):
        if len(value) > 1:
            yield value[:1]
            yield value[:-1]
        for place, item in enumerate(value):
            for smaller in _smaller(item):
                yield (*value[:place], smaller, *value[place + 1 :])


def _with(case: Case, place: int | None, name: str, value: Any) -> Case:
    """``case`` with one option, or argument of the operation at ``place``, set to ``value``."""
    if place is None:
        return replace(case, options={**case.options, name: value})
    operations = list(case.operations)
    operations[place] = (operations[place][0], {**operations[place][1], name: value})
    return replace(case, operations=tuple(operations))
