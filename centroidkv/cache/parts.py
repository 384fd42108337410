"""What a growing layer keeps: everything in one state, or per row what a storage holds and the tokens since.

Both answer the same calls, and both are never changed: a step makes a new one, so a step that fails leaves the old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from centroidkv.cache.room import Room
from centroidkv.cache.storage import Exact, Held, Storage, own
from centroidkv.dense import compact
from centroidkv.errors import CacheError
from centroidkv.rotary import Rotary
from centroidkv.state import KVState
from centroidkv.state_ops import columns, join_rows, join_slots, widened
from centroidkv.state_ops import row as row_of


class Whole:
    """One state of all slots: no storage, nothing to bring near."""

    form = "whole"

    def __init__(self, state: KVState, room: Room | None = None) -> None:
        self._state, self._room = state, room or Room()

    def state(self) -> KVState:
        """Everything, to attend to."""
        return self._state

    @property
    def like(self) -> KVState:
        """A state of the same batch, heads, channels, types and device."""
        return self._state

    @property
    def slots(self) -> int:
        """Columns of :meth:`state`."""
        return self._state.slots

    @property
    def nbytes(self) -> int:
        """Bytes held, room to grow included."""
        return self._room.nbytes_behind(self._state) + self._state.nbytes

    def extend(self, new: KVState) -> Whole:
        """With ``new`` tokens behind; their positions are final, their ``seen`` is what they add."""
        return Whole(self._room.extend(self._state, new), self._room)

    def settle(self, kept: KVState, live: list[int], stored: set[int]) -> Whole:
        """After an event that made ``kept`` of everything; its rows hold ``live`` slots behind empty ones."""
        return Whole(kept)

    def reorder(self, rows: Tensor) -> Whole:
        """Rows kept, repeated or permuted."""
        return Whole(self._state.rows(rows.to(self._state.keys.device)))

    def crop(self, tokens: int) -> tuple[Whole, list[int]]:
        """Without the last ``tokens`` columns, and how many real tokens each row lost."""
        left = max(self.slots - tokens, 0)  # columns of padding may have no slot
        gone = self._state.live[:, :, left:].sum(-1).amax(-1)
        cropped = self._state.map_slots(lambda x: x[:, :, :left].clone(), seen=self._state.seen - gone)
        return Whole(cropped), gone.tolist()

    def fetch(self) -> None:
        """Everything is near."""

    def pieces(self) -> list[list[KVState]]:
        """All rows, in one piece."""
        return [[self._state]]

    def pack(self) -> tuple[list[Held], dict[str, Any]]:
        """As Held records and JSON."""
        return [Exact().put(self._state)], {}

    @classmethod
    def unpack(cls, held: Sequence[Held], rotary: Rotary | None, device: torch.device) -> Whole:
        """What :meth:`pack` said, on ``device``."""
        return cls(replace(Exact().get(Exact().rest(held[0], device), device), rotary=rotary))


@dataclass(frozen=True, eq=False)
class Row:
    """One row: what the storage holds since its last event, and its tokens since then (``[1, H, L, D]``)."""

    held: Held | None
    tail: KVState | None


class Parts:
    """Every row on its own, because every row has its own clock; put together, behind empty slots, for each step.

    Rows of a beam search that began as one share what is held until their next event.
    """

    def __init__(self, storage: Storage, rows: Sequence[Row], slots: int, like: KVState) -> None:
        self._storage, self._rows, self.slots = storage, tuple(rows), slots
        self.like = like
        """No slots, but batch, heads, channels, types, device, rotation, and the tokens each row has seen."""
        self._near: dict[int, Held] = {}

    @classmethod
    def begin(cls, storage: Storage, new: KVState) -> Parts:
        """Of the first tokens."""
        rows = [Row(None, row_of(new, row)) for row in range(new.batch)]
        return cls(storage, rows, new.slots, columns(new, slice(0, 0)).map_slots(Tensor.clone))

    @property
    def form(self) -> str:
        """The layout of what is held."""
        return self._storage.form

    def state(self) -> KVState:
        """Everything, to attend to; what was brought near is used up."""
        near, self._near = self._near, {}
        device = self.like.keys.device
        got: dict[int, KVState] = {}  # beams share
        rows = []
        for row in self._rows:
            pieces = [] if row.tail is None else [row.tail]
            if row.held is not None:
                key = id(row.held)
                if key not in got:
                    got[key] = self._storage.get(near.get(key, row.held), device)
                pieces.insert(0, got[key])
            rows.append(widened(join_slots(pieces), self.slots))
        return replace(join_rows(rows), seen=self.like.seen, rotary=self.like.rotary)

    @property
    def nbytes(self) -> int:
        """Bytes held, wherever they are; what rows share counts once."""
        held = {id(row.held): row.held.nbytes for row in self._rows if row.held is not None}
        tails = {id(row.tail): row.tail.nbytes for row in self._rows if row.tail is not None}
        return sum(held.values()) + sum(tails.values())

    def extend(self, new: KVState) -> Parts:
        """With ``new`` tokens behind."""
        rows = []
        for number, row in enumerate(self._rows):
            added = row_of(new, number)
            rows.append(Row(row.held, _own(added) if row.tail is None else join_slots((row.tail, added))))
        like = replace(self.like, seen=self.like.seen + new.seen)
        grown = Parts(self._storage, rows, self.slots + new.slots, like)
        grown._near = self._near
        return grown

    def settle(self, kept: KVState, live: list[int], stored: set[int]) -> Parts:
        """After an event that made ``kept`` of everything: the storage takes the rows ``stored``."""
        rows = []
        for number, row in enumerate(self._rows):
            if number in stored:
                dense = columns(row_of(kept, number), slice(kept.slots - live[number], None))
                rows.append(Row(self._storage.put(dense), None))
            else:  # in ``kept`` empty slots are in front; the row's own tokens are brought into that order
                rows.append(Row(row.held, row.tail and compact(row.tail, row.tail.live)))
        return Parts(self._storage, rows, kept.slots, self.like)

    def reorder(self, rows: Tensor) -> Parts:
        """Rows kept, repeated or permuted."""
        return Parts(
            self._storage,
            [self._rows[row] for row in rows.tolist()],
            self.slots,
            self.like.rows(rows.to(self.like.keys.device)),
        )

    def crop(self, tokens: int) -> tuple[Parts, list[int]]:
        """Without the last ``tokens`` columns, and how many real tokens each row lost."""
        rows, gone = [], []
        for row in self._rows:
            if row.tail is None or row.tail.slots < tokens:
                raise CacheError(
                    f"asked to take back {tokens} columns, but a row has dropped padding from among its last ones; "
                    "crop less"
                )
            left = row.tail.slots - tokens
            gone.append(int(row.tail.live[:, :, left:].sum(-1).amax()))
            rows.append(Row(row.held, _own(columns(row.tail, slice(0, left)))))
        lost = torch.tensor(gone, device=self.like.seen.device)
        return Parts(self._storage, rows, self.slots - tokens, replace(self.like, seen=self.like.seen - lost)), gone

    def fetch(self) -> None:
        """Start to bring near what the next step will attend to."""
        held = {id(row.held): row.held for row in self._rows if row.held is not None}
        device = self.like.keys.device
        self._near = {key: self._near.get(key) or self._storage.fetch(one, device) for key, one in held.items()}

    def pieces(self) -> list[list[KVState]]:
        """Of every row: what the storage gives back, and the tokens since."""
        device, found = self.like.keys.device, []
        for row in self._rows:
            stored = [] if row.held is None else [self._storage.get(row.held, device)]
            found.append(stored + ([] if row.tail is None else [row.tail]))
        return found

    def pack(self) -> tuple[list[Held], dict[str, Any]]:
        """As Held records, shared ones once, and JSON that says which belong to a row."""
        packed: list[Held] = [Exact().put(self.like)]
        numbers: dict[int, int] = {}

        def number(part: Held | KVState | None) -> int | None:
            if part is None:
                return None
            if id(part) not in numbers:
                numbers[id(part)] = len(packed)
                packed.append(part if isinstance(part, Held) else Exact().put(part))
            return numbers[id(part)]

        rows = [[number(row.held), number(row.tail)] for row in self._rows]
        return packed, {"rows": rows, "slots": self.slots}

    @classmethod
    def unpack(
        cls, held: Sequence[Held], facts: dict[str, Any], storage: Storage, rotary: Rotary | None, device: torch.device
    ) -> Parts:
        """What :meth:`pack` said, on ``device`` or where the storage lets it rest."""
        exact = Exact()
        parts: dict[int, Any] = {}  # number -> what is there, so that sharing survives
        for stored, tail in facts["rows"]:
            if stored is not None:
                parts.setdefault(stored, storage.rest(held[stored], device))
            if tail is not None:
                parts.setdefault(tail, exact.get(exact.rest(held[tail], device), device))
        rows = [Row(parts.get(stored), parts.get(tail)) for stored, tail in facts["rows"]]
        like = replace(exact.get(exact.rest(held[0], device), device), rotary=rotary)
        return cls(storage, rows, facts["slots"], like)


def _own(state: KVState) -> KVState:
    return state.map_slots(own)
