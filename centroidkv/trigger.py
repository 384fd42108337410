"""When to compress: the one definition that all engines go by, in plain numbers, so that no step waits for a device.

A *row* is one sequence of a batch or one request of a server. It is looked at in *moments*, and compressed in a moment
if it holds more slots than its budget and the budget has room for what must be preserved. Triggers differ in their
moments:

- :class:`OverBudget`: as soon as that is so, then ``interval`` tokens after the last compression. For caches that see
  every token come (transformers).
- :class:`PromptEnd`: when the prompt is computed, then every ``interval`` tokens, whatever happened. For servers, whose
  scheduler and worker know both numbers and nothing else (vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass

from centroidkv.compressor import Compressor
from centroidkv.errors import StageError
from centroidkv.records import Budget

__all__ = [
    "OverBudget",
    "PromptEnd",
]


def has_more_than(budget: Budget, compressor: Compressor, seen: int, slots: int) -> bool:
    """Whether a row of ``slots`` slots that has seen ``seen`` tokens is over ``budget``, which has room to preserve."""
    return slots > budget.slots(seen) and compressor.fits(seen, slots, budget)


@dataclass(frozen=True)
class OverBudget:
    """Due when a row is over the budget, but not before ``interval`` tokens have come since it was last compressed.

    >>> from centroidkv import Budget, presets
    >>> trigger = OverBudget(presets.centroidkv(Budget.tokens(100)), interval=16)
    >>> trigger.due(seen=100, slots=100), trigger.due(seen=101, slots=101)
    (False, True)
    >>> trigger.due(seen=116, slots=115, since=15, events=1), trigger.wait(slots=115, since=15, events=1)
    (False, 1)
    """

    compressor: Compressor
    interval: int

    def __post_init__(self) -> None:
        _check(self.interval)

    def due(self, seen: int, slots: int, since: int = 0, events: int = 0) -> bool:
        """Whether to compress now.

        Args:
            seen: real tokens so far.
            slots: slots held.
            since: real tokens since the last compression, or, after the first, the last attempt that merged nothing.
            events: compressions so far that merged something; before the first of them no interval is waited for.
        """
        if events and since < self.interval:
            return False
        return has_more_than(self.compressor.budget, self.compressor, seen, slots)

    def wait(self, slots: int, since: int = 0, events: int = 0) -> int:
        """Tokens after which :meth:`due` may be true, at least 1; for a budget of a fixed number of slots."""
        over = self.compressor.budget.slots(0) + 1 - slots
        return max(over, self.interval - since if events else 1, 1)


@dataclass(frozen=True)
class PromptEnd:
    """Due when ``prompt`` tokens are computed, and at every ``interval``-th token after them.

    >>> trigger = PromptEnd(interval=128)
    >>> trigger.moments(prompt=500, computed=499), trigger.moments(prompt=500, computed=756), trigger.tokens(500, 3)
    (0, 3, 756)
    >>> trigger.due(prompt=500, computed=755), trigger.due(prompt=500, computed=756)
    (False, True)
    """

    interval: int

    def __post_init__(self) -> None:
        _check(self.interval)

    def moments(self, prompt: int, computed: int) -> int:
        """How many moments have passed, those included in which nothing was to be done."""
        return 0 if computed < prompt else 1 + (computed - prompt) // self.interval

    def tokens(self, prompt: int, number: int) -> int:
        """The number of computed tokens at moment ``number``, the first being 1."""
        return prompt + (number - 1) * self.interval

    def due(self, prompt: int, computed: int) -> bool:
        """Whether this is a moment."""
        return computed > 0 and self.moments(prompt, computed) > self.moments(prompt, computed - 1)


def _check(interval: int) -> None:
    """Refuse an interval that is no whole number of tokens."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise StageError(f"interval is an int, a number of tokens >= 1, got {interval!r}")
