"""What is counted of every row of a batch, to tell when it is compressed and what can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from centroidkv.state import KVState
from centroidkv.trigger import OverBudget


@dataclass(frozen=True)
class RowClock:
    """When one row is due, in plain numbers, so that no step has to wait for the device.

    Padding is not counted: a row of a padded batch is due after the very tokens after which it would be due alone.

    Args:
        seen: real tokens so far.
        live: slots held.
        since: real tokens since the last compression or attempt at one.
        events: compressions so far that merged something.
        columns: columns of the batch, padding included, that are still the row's last slots: what can be cropped.
    """

    seen: int = 0
    live: int = 0
    since: int = 0
    events: int = 0
    columns: int = 0

    def after(self, tokens: int, columns: int) -> RowClock:
        """``columns`` columns later, of which ``tokens`` were this row's own; negative numbers take back."""
        return replace(
            self,
            seen=self.seen + tokens,
            live=self.live + tokens,
            since=max(self.since + tokens, 0),
            columns=max(self.columns + columns, 0),
        )

    def due(self, trigger: OverBudget) -> bool:
        """Whether this row is to be compressed now."""
        return trigger.due(self.seen, self.live, self.since, self.events)

    def wait(self, trigger: OverBudget) -> int:
        """Tokens until it may be due, at least 1."""
        return trigger.wait(self.live, self.since, self.events)

    def at_event(self, live: int, merged: bool) -> RowClock:
        """Just compressed to ``live`` slots. An attempt that merged nothing is no event: the next one waits for an
        interval all the same, or for the next token if there was no event yet.
        """
        columns = 0 if merged or self.events else self.columns
        return replace(self, live=live, since=0, columns=columns, events=self.events + merged)


def after_event(clocks: Sequence[RowClock], due: Sequence[int], before: KVState, after: KVState) -> list[RowClock]:
    """Every row's clock after the rows ``due`` of ``before`` were compressed and all of them moved into ``after``."""
    counts = after.live.sum(-1)
    live, merged = counts.amax(-1).tolist(), (counts != before.live.sum(-1)).any(-1).tolist()
    clocks = [clock.at_event(live[row], merged[row]) if row in due else clock for row, clock in enumerate(clocks)]
    return after_packing(clocks, before)


def after_packing(clocks: Sequence[RowClock], before: KVState) -> list[RowClock]:
    """Every row's clock after empty slots came to the front in all of them.

    A row with padding behind a token has other slots in the place of its last columns now, whether it was due or not.
    """
    ordered = (before.live[..., 1:] >= before.live[..., :-1]).all(-1).all(-1).tolist()
    return [clock if ordered[row] else replace(clock, columns=0) for row, clock in enumerate(clocks)]
