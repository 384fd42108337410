"""Make a failing case smaller while it still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tools.fuzz.draw import Case


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found in ``seconds`` for which ``fails`` holds, as it does for ``case``.

    Fewer operations, then options left at their defaults, then arguments left at theirs, then smaller numbers; again
    from the start as long as anything helped.
    """
    end = time.monotonic() + seconds
    better = True
    while better and time.monotonic() < end:
        better = False
        for candidates in (_fewer_operations, _fewer_options, _fewer_arguments, _smaller_numbers):
            again = True
            while again and time.monotonic() < end:
                again = False
                for smaller in candidates(case):
                    if time.monotonic() >= end:
                        break
                    if fails(smaller):
                        case, again, better = smaller, True, True
                        break
    return case


def _fewer_operations(case: Case) -> Iterator[Case]:
    count = len(case.operations)
    size = count
    while size >= 1:
        for start in range(count - size, -1, -1):
            yield replace(case, operations=case.operations[:start] + case.operations[start + size :])
        size //= 2


def _fewer_options(case: Case) -> Iterator[Case]:
    for name in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != name})


def _fewer_arguments(case: Case) -> Iterator[Case]:
    for place, (name, arguments) in enumerate(case.operations):
        for gone in arguments:
            left = {k: v for k, v in arguments.items() if k != gone}
            yield _with(case, place, (name, left))


def _smaller_numbers(case: Case) -> Iterator[Case]:
    for name, value in case.options.items():
        for smaller in _smaller(value):
            yield replace(case, options={**case.options, name: smaller})
    for place, (operation, arguments) in enumerate(case.operations):
        for name, value in arguments.items():
            for smaller in _smaller(value):
                yield _with(case, place, (operation, {**arguments, name: smaller}))


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int) and value > 0:
        yield from dict.fromkeys((0, value // 2, value - value // 4, value - 1))
    elif isinstance(value, tuple):
        if len(value) > 1:
            yield value[:1]
            yield value[:-1]
        for place, item in enumerate(value):
            for smaller in _smaller(item):
                yield (*value[:place], smaller, *value[place + 1 :])


def _with(case: Case, place: int, operation: tuple[str, dict[str, Any]]) -> Case:
    return replace(case, operations=(*case.operations[:place], operation, *case.operations[place + 1 :]))
