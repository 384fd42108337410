"""When a row of a batch is compressed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RowClock:
    """When one row is due, in plain numbers, so that no step has to wait for the device.

    Padding is not counted: a row of a padded batch is due after the very tokens after which it would be due alone.

    Args:
        seen: real tokens so far.
        live: slots held.
        since: real tokens since the last compression.
        events: compressions so far.
        columns: columns of the batch since the last compression, padding included: what can be cropped.
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

    def at_event(self, live: int) -> RowClock:
        """Just compressed to ``live`` slots; an attempt that merged nothing waits for the next interval as well."""
        return replace(self, live=live, since=0, columns=0, events=self.events + (live < self.live))
