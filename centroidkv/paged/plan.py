"""Which blocks of a request hold centroids after how many tokens: one pure function for scheduler and worker.

Both sides evaluate it on (prompt length, tokens computed), which both know, so no message passes between them and none
can be late. It needs nothing of vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from operator import index

from centroidkv.compressor import Compressor
from centroidkv.errors import ServingError
from centroidkv.records import Budget
from centroidkv.trigger import PromptEnd, has_more_than

PROMPTS_REMEMBERED = 4096


@dataclass(frozen=True)
class Region:
    """Logical blocks ``[first, end)`` of a request hold centroids; those before are given back, later ones are raw."""

    first: int = 0
    end: int = 0


@dataclass(frozen=True)
class Event:
    """One compression of one request, once ``tokens`` tokens are computed.

    Blocks ``[before.first, after.end)`` are read, the result fills ``[after.first, after.end)``: the last of those
    blocks, so that the leading ones, which other requests may share, are never written.
    """

    tokens: int
    before: Region
    after: Region

    @property
    def source_blocks(self) -> int:
        """Blocks that are read."""
        return self.after.end - self.before.first

    @property
    def target_blocks(self) -> int:
        """Blocks that are left."""
        return self.after.end - self.after.first


class ServingPlan:
    """When a request is compressed, and into which of its blocks.

    A request with a prompt of P tokens is compressed when P tokens are computed, and then every ``interval`` tokens:
    everything in its full blocks, centroids and raw tokens alike, down to the budget of the tokens in full blocks. The
    budget is rounded down to whole blocks, so that every block left is full. An event that would leave as many blocks
    as before, or whose budget cannot hold what must be preserved yet, is skipped.

    Args:
        compressor: which stages, which budget; its sizes must be known ahead of the data.
        block_size: slots per block.
        interval: tokens between two compressions.

    >>> from centroidkv import presets
    >>> plan = ServingPlan(presets.quick(0.25), block_size=32, interval=128)
    >>> plan.region(prompt=4000, computed=3999), plan.region(prompt=4000, computed=4000)
    (Region(first=0, end=0), Region(first=94, end=125))
    """

    def __init__(self, compressor: Compressor, block_size: int, interval: int) -> None:
        if not compressor.plannable:
            raise ServingError(f"sizes of {compressor!r} depend on the data; a server must know them ahead")
        self.compressor = compressor
        self.block_size = _count("block_size", block_size, 1)
        self.interval = _count("interval", interval, 1)
        self.trigger = PromptEnd(self.interval)
        self._regions: OrderedDict[int, list[Region]] = OrderedDict()
        self._untouched = lru_cache(PROMPTS_REMEMBERED)(self._count_untouched)  # asked for in every step

    def times(self, prompt: int, computed: int) -> int:
        """How many moments of compression, skipped ones included, have passed."""
        return self.trigger.moments(_tokens(prompt), _tokens(computed))

    def region(self, prompt: int, computed: int) -> Region:
        """Where the centroids are after all events up to ``computed`` tokens."""
        return self._region(prompt, self.times(prompt, computed))

    def events(self, prompt: int, after: int, until: int) -> Iterator[Event]:
        """Compressions due when the number of computed tokens grows from ``after`` to ``until``, in order."""
        for number in range(self.times(prompt, after) + 1, self.times(prompt, until) + 1):
            before, then = self._region(prompt, number - 1), self._region(prompt, number)
            if then != before:
                yield Event(self.trigger.tokens(prompt, number), before, then)

    def acts(self, limit: int) -> bool:
        """Whether any request of up to ``limit`` tokens is ever compressed."""
        return any(next(self.events(prompt, 0, limit), None) is not None for prompt in (1, limit))

    def untouched_blocks(self, prompt: int, limit: int) -> int:
        """Leading blocks of a request with this prompt that no event writes, up to ``limit`` tokens.

        Those may be shared with other requests. Targets only move on, so the first event's target decides.
        """
        return self._untouched(_tokens(prompt), _tokens(limit))

    def _count_untouched(self, prompt: int, limit: int) -> int:
        for event in self.events(prompt, 0, limit):
            return event.after.first
        return limit // self.block_size

    def sized(self, slots: int) -> Compressor:
        """The compressor with a budget of exactly ``slots`` slots."""
        return self.compressor.with_(budget=Budget.tokens(slots))

    def _region(self, prompt: int, times: int) -> Region:
        prompt = _tokens(prompt)
        known = self._regions.setdefault(prompt, [Region()])
        self._regions.move_to_end(prompt)
        while len(known) <= times:
            known.append(self._next(known[-1], self.trigger.tokens(prompt, len(known))))
        while len(self._regions) > PROMPTS_REMEMBERED:
            self._regions.popitem(last=False)
        return known[times]

    def _next(self, before: Region, tokens: int) -> Region:
        end = tokens // self.block_size
        seen, slots = end * self.block_size, (end - before.first) * self.block_size
        blocks = self.compressor.budget.slots(seen) // self.block_size if seen else 0
        if end <= before.end or blocks < 1:
            return before
        budget = blocks * self.block_size
        if not has_more_than(Budget.tokens(budget), self.compressor, seen, slots):
            return before
        if self.sized(budget).plan(seen, slots).final != budget:
            return before
        return Region(end - blocks, end)


def _count(name: str, number: int, least: int) -> int:
    """A whole number as a plain int."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
        raise ServingError(f"{name} is a whole number >= {least}, got {number!r}")
    return int(number)


def _tokens(number: int) -> int:
    """A number of tokens as a plain int: what is remembered by 5.0 would be found by 5, to which it is equal."""
    try:
        return index(number)
    except TypeError:
        raise ServingError(f"tokens are counted in whole numbers, got {number!r}") from None
