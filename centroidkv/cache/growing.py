"""One layer's state that grows token by token and is compressed when it is due."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.cache.clock import RowClock, after_event, after_packing
from centroidkv.cache.parts import Parts, Whole
from centroidkv.cache.query_log import QueryLog
from centroidkv.cache.storage import Held, Storage, as_storage
from centroidkv.compressor import Compressor
from centroidkv.dense import last_live, map_rows
from centroidkv.errors import CacheError, RotaryError, StageError
from centroidkv.guards import check_fit, refuse_gradients
from centroidkv.queries import QUERIES
from centroidkv.rotary import Rotary
from centroidkv.state import KVState
from centroidkv.trigger import OverBudget


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
        storage: how what was compressed is held between steps (:mod:`centroidkv.cache.storage`); tokens since a row's
            last event stay as they are. None: one state of all slots, as it is.
    """

    def __init__(
        self, compressor: Compressor, interval: int, rotary: Rotary | None = None, storage: Storage | None = None
    ) -> None:
        storage = None if storage is None else as_storage(storage)
        self.compressor, self.interval, self.rotary, self.storage = compressor, interval, rotary, storage
        self.trigger = OverBudget(compressor, interval)
        self.clear()

    def clear(self) -> None:
        """Forget everything but the configuration."""
        self._kept: Whole | Parts | None = None
        self.logical = 0
        """Columns seen, padding included: what position ids and padding masks count."""
        self.seconds = 0.0
        self.waits = False
        """Whether newly appended tokens are clustered only after the next :meth:`crop`, which may take them back."""
        self._unsettled = False
        self._clocks: list[RowClock] = []
        self._queries = QueryLog()

    def restore(self, state: KVState, logical: int) -> None:
        """Go on from ``state``, the compressed form of ``logical`` columns, as if it had just been compressed.

        Raises:
            CacheError: a row of the state has seen more tokens than there were columns.
        """
        seen, live = state.seen.tolist(), state.live.sum(-1).amax(-1).tolist()
        if any(tokens > logical for tokens in seen):
            raise CacheError(f"a state whose rows have seen {seen} tokens cannot stand for {logical} columns")
        kept = self._begin(state)
        if self.storage is not None:
            kept = kept.settle(last_live(state, max(live, default=0)), live, set(range(state.batch)))
        self.clear()
        self._kept, self.logical = kept, logical
        self._clocks = [RowClock(*row, since=0, events=1) for row in zip(seen, live, strict=True)]

    def _begin(self, new: KVState) -> Whole | Parts:
        return Whole(new) if self.storage is None else Parts.begin(self.storage, new)

    @property
    def state(self) -> KVState | None:
        """Everything held, as attention sees it; with a storage put together (and dequantised) anew each time."""
        return None if self._kept is None else self._kept.state()

    @property
    def like(self) -> KVState | None:
        """Some state of the same batch, heads, channels, types and device, for those who need no contents."""
        return None if self._kept is None else self._kept.like

    @property
    def events(self) -> int:
        """How often clustering ran, of the row where it ran most."""
        return max((clock.events for clock in self._clocks), default=0)

    @property
    def moved(self) -> bool:
        """Whether slots may stand for other columns than their places say: attention needs their degrees then."""
        return any(clock.columns < self.logical for clock in self._clocks)

    @property
    def physical(self) -> int:
        """Slots held."""
        return 0 if self._kept is None else self._kept.slots

    @property
    def nbytes(self) -> int:
        """Bytes held, on any device: keys, values, degrees, positions, and the queries since the last compression."""
        return 0 if self._kept is None else self._kept.nbytes + self._queries.nbytes

    @property
    def nbytes_full(self) -> int:
        """Bytes of keys and values had nothing been compressed."""
        parts = () if self._kept is None else (self._kept.like.keys, self._kept.like.values)
        return sum(self.logical * x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in parts)

    def append(
        self, keys: Tensor, values: Tensor, real: Tensor | None = None, queries: Tensor | None = None,
        degrees: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Add ``keys [B, H, L, D]`` and ``values [B, H, L, Dv]``; ``real [B, L]`` marks tokens that are not padding.

        ``queries [B, Hq, L, D]`` of the same tokens, after RoPE and times the attention scale, are needed by
        compressors that say so (``compressor.needs_queries``); others ignore them.

        Returns:
            Keys, values and degrees to attend to in this step: all slots, the new ones last. Degrees are None as long
            as nothing was compressed, unless ``degrees`` asks for them: other layers were, and the mask is theirs.

        Raises:
            CacheError, DtypeError: rows, heads or types other than those held; keys and values have their own type.
            Whatever the compressor raises; the layer is then as it was before the call.
        """
        if self.compressor.needs_queries and queries is None:
            raise StageError(
                "this compressor weighs slots by the model's queries: append(keys, values, real, queries=...), or "
                f"choose one that needs none, such as presets.distinctive: {self.compressor!r}"
            )
        refuse_gradients("this cache", keys, values)
        if self._kept is not None and keys.ndim == values.ndim == 4:  # other shapes are KVState's to refuse
            check_fit(self._kept.like, keys, values)
        longer = self._grow(keys, values, real)
        grown = longer.state()
        length = keys.shape[2]
        new = [length] * keys.shape[0] if real is None else real.sum(-1).tolist()
        clocks = [clock.after(n, length) for clock, n in zip(self._clocks or [RowClock()] * len(new), new, strict=True)]
        degree = grown.degree if self.moved or degrees else None
        log = self._note(queries, grown, real)
        # Announced crops that stay out end the waiting: assisted generation is over, and the layer must not grow on.
        waits = self.waits and not self._unsettled
        if waits:
            self._kept, self._clocks, self._queries = longer, clocks, log or self._queries
        else:
            self._settle(longer, grown, clocks, log)
        self.waits = self._unsettled = waits
        self.logical += length
        return grown.keys, grown.values, degree

    def _settle(self, longer: Whole | Parts, grown: KVState, clocks: list[RowClock], log: QueryLog | None) -> bool:
        """Keep ``longer``, rows that are due compressed, and say if any was; a compressor's error changes nothing."""
        due = [row for row, clock in enumerate(clocks) if clock.due(self.trigger)]
        seconds = 0.0
        if due:
            start = time.perf_counter()
            kept = map_rows(grown, due, lambda rows: self._compress(rows, log, due))
            clocks = after_event(clocks, due, grown, kept)
            # A row in which nothing ever merged can still be cropped: it stays as it is.
            longer = longer.settle(kept, [c.live for c in clocks], {row for row in due if clocks[row].events})
            seconds = time.perf_counter() - start
        if log is not None:
            log.forget(due)
            self._queries = log
        self._kept, self._clocks = longer, clocks
        self.seconds += seconds
        return bool(due)

    @property
    def counts(self) -> list[int]:
        """Slots that each row holds."""
        return [clock.live for clock in self._clocks]

    @property
    def wait(self) -> int:
        """Tokens until some row may be due, at least 1; for a budget of a fixed number of slots."""
        return min((clock.wait(self.trigger) for clock in self._clocks), default=1)

    def take_over(self, grown: KVState, tokens: int) -> bool:
        """Go on from ``grown``, with ``tokens`` more of every row, all real; as :meth:`_settle`."""
        due = self._settle(Whole(grown), grown, [clock.after(tokens, tokens) for clock in self._clocks], None)
        self.logical += tokens
        return due

    def lie_in(self, state: KVState) -> None:
        """What is held lies in ``state`` from now on, the slots of every row at its end."""
        if self._kept is not None:
            self._clocks, self._kept = after_packing(self._clocks, self._kept.state()), Whole(state)

    def _note(self, queries: Tensor | None, grown: KVState, real: Tensor | None) -> QueryLog | None:
        """The log with this step's queries, un-rotated; the one held is not changed, in case the step fails."""
        if queries is None or not self.compressor.needs_queries:
            return None
        if self.rotary is None:
            raise RotaryError(f"{self.compressor!r} moves queries and needs to know how they are rotated: set rotary")
        return self._queries.extended(queries, grown.positions, real, self.rotary)

    def _compress(self, rows: KVState, log: QueryLog | None, due: list[int]) -> KVState:
        if log is None:
            return self.compressor(rows, strict=False)
        asked = replace(rows, head_data={**rows.head_data, QUERIES: log.sample(due, rows.heads)})
        return replace(self.compressor(asked, strict=False), head_data=rows.head_data)

    def _grow(self, keys: Tensor, values: Tensor, real: Tensor | None) -> Whole | Parts:
        new = KVState.from_kv(keys, values, real, rotary=self.rotary)
        # int32 holds any position and is half the bytes.
        start = 0 if self._kept is None else self._kept.like.seen[:, None, None]
        new = replace(new, positions=(new.positions + start).int())
        return self._begin(new) if self._kept is None else self._kept.extend(new)

    def fetch(self) -> None:
        """Start to bring near what the next :meth:`append` attends to, where a storage keeps it elsewhere."""
        if self._kept is not None:
            self._kept.fetch()

    def reorder(self, rows: Tensor) -> None:
        """Keep, repeat or permute rows: keys, values, degrees and positions move together."""
        if self._kept is not None:
            self._kept = self._kept.reorder(rows)
            self._clocks = [self._clocks[row] for row in rows.tolist()]
            self._queries.reorder(rows)

    def crop(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens; then cluster those that waited for it (:attr:`waits`).

        Raises:
            CacheError: one of them may already be part of a centroid, which cannot be undone.
        """
        self.check_crop(tokens)
        if self._kept is None:
            return
        if tokens:
            self._kept, gone = self._kept.crop(tokens)
            self._clocks = [clock.after(-n, -tokens) for clock, n in zip(self._clocks, gone, strict=True)]
            self.logical -= tokens
            self._queries.crop(tokens)
        if self._unsettled:
            log = self._queries.copy() if self.compressor.needs_queries else None
            self._settle(self._kept, self._kept.state(), self._clocks, log)
            self._unsettled = False

    def check_crop(self, tokens: int) -> None:
        """Raise what :meth:`crop` would raise, and change nothing."""
        if tokens == 0 or self._kept is None:
            return
        removable = min(clock.columns for clock in self._clocks)
        if tokens > removable:
            raise CacheError(
                f"asked to take back {tokens} tokens, but only the last {removable} were not yet clustered; merged "
                "tokens cannot be separated. Crop less, or use a larger interval"
            )

    def pack(self) -> tuple[list[Held], dict[str, Any]]:
        """Everything as Held records, and what JSON can say; :meth:`unpack` goes on from it as this one would.

        Raises:
            CacheError: there are no tokens.
        """
        if self._kept is None:
            raise CacheError("nothing was appended yet, so there is nothing to pack")
        held, layout = self._kept.pack()
        facts = {
            "form": self._kept.form, "layout": layout, "logical": self.logical, "seconds": self.seconds,
            "clocks": [list(astuple(clock)) for clock in self._clocks],
        }  # fmt: skip
        return [self._queries.pack(), *held], facts

    def unpack(self, held: Sequence[Held], facts: dict[str, Any], device: torch.device) -> None:
        """Go on from what :meth:`pack` returned, on ``device``.

        Raises:
            CacheError: it was held in another form than this one's storage reads.
        """
        form = Whole.form if self.storage is None else self.storage.form
        if facts["form"] != form:
            raise CacheError(f"what was packed is held as {facts['form']!r}, this storage reads {form!r}; use the same")
        queries = QueryLog.unpack(held[0], device)
        kept: Whole | Parts
        if self.storage is None:
            kept = Whole.unpack(held[1:], self.rotary, device)
        else:
            kept = Parts.unpack(held[1:], facts["layout"], self.storage, self.rotary, device)
        self._kept, self._queries = kept, queries
        self.logical, self.seconds = facts["logical"], facts["seconds"]
        self._clocks = [RowClock(*numbers) for numbers in facts["clocks"]]

    def pieces(self) -> list[list[KVState]]:
        """What is held, row by row or of all rows at once, piece behind piece; to look at."""
        return [] if self._kept is None else self._kept.pieces()
