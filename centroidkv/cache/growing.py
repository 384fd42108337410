"""One layer's state that grows token by token and is compressed when it is due."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from centroidkv.cache.query_log import QueryLog, thin
from centroidkv.compressor import Compressor
from centroidkv.dense import map_rows
from centroidkv.errors import CacheError, RotaryError, StageError
from centroidkv.queries import QUERIES
from centroidkv.rotary import Rotary
from centroidkv.state import KVState


class GrowingState:
    """Appends new tokens to a KVState and compresses it: first when over budget, then every ``interval`` tokens.

    The tokens that trigger a compression still attend to the uncompressed slots: :meth:`append` returns those and
    stores the compressed state, so the full keys are freed as soon as this layer's attention is done with them.
    Between two events the state holds at most budget + interval slots (if the matcher is exact and appends are shorter
    than the interval). Every row of a batch has its own clock, so a padded row fares as it would alone.

    Args:
        compressor: what to do.
        interval: tokens between two compressions, >= 1.
        rotary: how keys are rotated, for stages that look at keys before RoPE.
    """

    def __init__(self, compressor: Compressor, interval: int, rotary: Rotary | None = None) -> None:
        if not isinstance(interval, int) or interval < 1:
            raise StageError(f"interval is a whole number of tokens >= 1, got {interval!r}")
        self.compressor = compressor
        self.interval = interval
        self.rotary = rotary
        self.clear()

    def clear(self) -> None:
        """Forget everything but the configuration."""
        self.state: KVState | None = None
        self.logical = 0
        """Columns seen, padding included: what position ids and padding masks count."""
        self.seconds = 0.0
        self.waits = False
        """Whether newly appended tokens are clustered only after the next :meth:`crop`, which may take them back."""
        self._unsettled = False
        self._clocks: list[_RowClock] = []
        self._queries = QueryLog()

    def restore(self, state: KVState, logical: int) -> None:
        """Go on from ``state``, the compressed form of ``logical`` columns, as if it had just been compressed.

        Raises:
            CacheError: a row of the state has seen more tokens than there were columns.
        """
        seen, live = state.seen.tolist(), state.live.sum(-1).amax(-1).tolist()
        if any(tokens > logical for tokens in seen):
            raise CacheError(f"a state whose rows have seen {seen} tokens cannot stand for {logical} columns")
        self.clear()
        self.state, self.logical = state, logical
        self._clocks = [_RowClock(*row, since=0, events=1) for row in zip(seen, live, strict=True)]

    @property
    def events(self) -> int:
        """How often clustering ran, of the row where it ran most."""
        return max((clock.events for clock in self._clocks), default=0)

    @property
    def physical(self) -> int:
        """Slots held."""
        return 0 if self.state is None else self.state.slots

    @property
    def nbytes(self) -> int:
        """Bytes held: keys, values, degrees, positions, and the queries asked since the last compression if kept."""
        return 0 if self.state is None else self.state.nbytes + self._queries.nbytes

    @property
    def nbytes_full(self) -> int:
        """Bytes of keys and values had nothing been compressed."""
        if self.state is None:
            return 0
        keys, values = self.state.keys, self.state.values
        per_slot = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
        return self.state.batch * self.state.heads * self.logical * per_slot

    def append(
        self, keys: Tensor, values: Tensor, real: Tensor | None = None, queries: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add ``keys [B, H, L, D]`` and ``values [B, H, L, Dv]``; ``real [B, L]`` marks tokens that are not padding.

        ``queries [B, Hq, L, D]`` of the same tokens, after RoPE and times the attention scale, are needed by
        compressors that say so (``compressor.needs_queries``); others ignore them.

        Returns:
            Keys, values and degrees to attend to in this step: all slots, the new ones last. Degrees are None as long
            as nothing was compressed, when attention needs no correction.

        Raises:
            Whatever the compressor raises; the layer is then as it was before the call.
        """
        if self.compressor.needs_queries and queries is None:
            raise StageError(
                "this compressor weighs slots by the model's queries: append(keys, values, real, queries=...), or "
                f"choose one that needs none, such as presets.distinctive: {self.compressor!r}"
            )
        grown = self._grow(keys, values, real)
        length = keys.shape[2]
        new = [length] * keys.shape[0] if real is None else real.sum(-1).tolist()
        clocks = [
            clock.after(n, length) for clock, n in zip(self._clocks or [_RowClock()] * len(new), new, strict=True)
        ]
        degree = grown.degree if self.events else None
        log = self._note(queries, grown, real)
        # No crop since the last tokens: nobody takes tokens back any more, and waiting on would mean growing.
        waits = self.waits and not self._unsettled
        if waits:
            self.state, self._clocks, self._queries = grown, clocks, log or self._queries
        else:
            self._settle(grown, clocks, log)
        self.waits = self._unsettled = waits
        self.logical += length
        return grown.keys, grown.values, degree

    def _settle(self, grown: KVState, clocks: list[_RowClock], log: QueryLog | None) -> None:
        """Store ``grown``, the rows that are due compressed; nothing is changed if the compressor raises."""
        due = [row for row, clock in enumerate(clocks) if self._due(clock)]
        kept, seconds = grown, 0.0
        if due:
            start = time.perf_counter()
            kept = map_rows(grown, due, lambda rows: self._compress(rows, log, due))
            seconds = time.perf_counter() - start
            live = kept.live.sum(-1).amax(-1).tolist()
            clocks = [clock.at_event(live[row]) if row in due else clock for row, clock in enumerate(clocks)]
        if log is not None:
            log.forget(due)
            self._queries = log
        self.state, self._clocks = kept, clocks
        self.seconds += seconds

    def _note(self, queries: Tensor | None, grown: KVState, real: Tensor | None) -> QueryLog | None:
        """The log with this step's queries, un-rotated; the one held is not changed, in case the step fails."""
        if queries is None or not self.compressor.needs_queries:
            return None
        if self.rotary is None:
            raise RotaryError(f"{self.compressor!r} moves queries and needs to know how they are rotated: set rotary")
        new = queries.shape[2]
        positions = grown.positions[:, :1, -new:].expand(queries.shape[:3])
        log = self._queries.copy()
        counts = (
            torch.ones(queries.shape[0], new, dtype=torch.bool, device=queries.device) if real is None else real != 0
        )
        # Thinned first: of a long prompt only the sample is un-rotated, not every query.
        counts, queries, positions = thin(counts, queries, positions)
        log.add(self.rotary.unrotate(queries, positions).to(queries.dtype), counts)
        return log

    def _compress(self, rows: KVState, log: QueryLog | None, due: list[int]) -> KVState:
        if log is None:
            return self.compressor(rows, strict=False)
        asked = replace(rows, head_data={**rows.head_data, QUERIES: log.sample(due, rows.heads)})
        return replace(self.compressor(asked, strict=False), head_data=rows.head_data)

    def row_started(self) -> list[bool]:
        """Per row, whether it has seen a real token; empty before the first append."""
        return [clock.seen > 0 for clock in self._clocks]

    def _due(self, clock: _RowClock) -> bool:
        if clock.events and clock.since < self.interval:
            return False
        over = clock.live > self.compressor.budget.slots(clock.seen)
        return over and self.compressor.fits(clock.seen, clock.live)

    def _grow(self, keys: Tensor, values: Tensor, real: Tensor | None) -> KVState:
        new = KVState.from_kv(keys, values, real, rotary=self.rotary)
        # int32 holds any position and is half the bytes.
        start = 0 if self.state is None else self.state.seen[:, None, None]
        positions = (new.positions + start).int()
        if self.state is None:
            return new.map_slots(lambda x: positions if x is new.positions else x)
        old = self.state
        if old.batch != new.batch or old.heads != new.heads:
            raise CacheError(
                f"the cache holds {old.batch} rows of {old.heads} KV heads, the new tokens have {new.batch} rows of "
                f"{new.heads}; one cache serves one batch: reset() it, or make another"
            )
        return KVState(
            keys=torch.cat((old.keys, keys), 2),
            values=torch.cat((old.values, values), 2),
            degree=torch.cat((old.degree, new.degree), 2),
            positions=torch.cat((old.positions, positions), 2),
            rounds=old.rounds,
            seen=old.seen + new.seen,
            rotary=self.rotary,
        )

    def reorder(self, rows: Tensor) -> None:
        """Keep, repeat or permute rows: keys, values, degrees and positions move together."""
        if self.state is None:
            return
        self.state = self.state.rows(rows.to(self.state.keys.device))
        self._clocks = [self._clocks[row] for row in rows.tolist()]
        self._queries.reorder(rows)

    def crop(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens; then cluster those that waited for it (:attr:`waits`).

        Raises:
            CacheError: one of them may already be part of a centroid, which cannot be undone.
        """
        self.check_crop(tokens)
        if self.state is None:
            return
        if tokens:
            self._take_back(self.state, tokens)
        if self._unsettled:
            self._settle(self.state, self._clocks, self._queries.copy() if self.compressor.needs_queries else None)
            self._unsettled = False

    def check_crop(self, tokens: int) -> None:
        """Raise what :meth:`crop` would raise, and change nothing."""
        if tokens == 0 or self.state is None:
            return
        removable = min((clock.since if clock.events else self.logical) for clock in self._clocks)
        if tokens > removable:
            raise CacheError(
                f"asked to take back {tokens} tokens, but only the last {removable} were not yet clustered; merged "
                "tokens cannot be separated. Crop less, or use a larger interval"
            )

    def _take_back(self, state: KVState, tokens: int) -> None:
        left = state.slots - tokens
        gone = state.live[:, :, left:].sum(-1).amax(-1)
        self.state = state.map_slots(lambda x: x[:, :, :left].clone(), seen=state.seen - gone)
        self._clocks = [clock.after(-n, -tokens) for clock, n in zip(self._clocks, gone.tolist(), strict=True)]
        self.logical -= tokens
        self._queries.crop(tokens)


@dataclass(frozen=True)
class _RowClock:
    """When one row is due, in plain numbers, so that no step has to wait for the device."""

    seen: int = 0
    live: int = 0
    since: int = 0
    events: int = 0

    def after(self, tokens: int, columns: int) -> _RowClock:
        """``columns`` columns later, of which ``tokens`` were this row's own."""
        return replace(self, seen=self.seen + tokens, live=self.live + tokens, since=max(self.since + columns, 0))

    def at_event(self, live: int) -> _RowClock:
        """Just compressed to ``live`` slots; an attempt that merged nothing waits for the next interval as well."""
        return replace(self, live=live, since=0, events=self.events + (live < self.live))
