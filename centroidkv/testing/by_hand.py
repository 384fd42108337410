"""The run by hand that every layer of a cache is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from centroidkv.compressor import Compressor
from centroidkv.state import KVState
from centroidkv.state_ops import columns, join_slots


@dataclass
class ByHand:
    """One row, token by token, in one state: the definition of what every layer does."""

    compressor: Compressor
    interval: int
    state: KVState | None = None
    seen: int = 0
    since: int = 0
    events: int = 0
    fresh: int = 0  # columns at the end, padding included, that no compression has looked at

    def append(self, keys: Tensor, values: Tensor, padding: int = 0) -> KVState | None:
        """Take the row's tokens, behind so much padding; what to attend to."""
        self.fresh += padding
        if keys.shape[2]:
            new = KVState.from_kv(keys, values)
            new = replace(new, positions=new.positions + self.seen)
            self.state = new if self.state is None else join_slots([self.state, new])
            for name in ("seen", "since", "fresh"):
                setattr(self, name, getattr(self, name) + keys.shape[2])
            self.state = replace(self.state, seen=torch.tensor([self.seen]))
        shown = self.state
        if shown is not None and (not self.events or self.since >= self.interval):
            over = shown.slots > self.compressor.budget.slots(self.seen)
            if over and self.compressor.fits(self.seen, shown.slots):
                self.state = self.compressor(shown, strict=False)
                self.since, merged = 0, self.state.slots < shown.slots
                self.fresh = 0 if merged or self.events else self.fresh
                self.events += merged
        return shown

    def crop(self, last: int) -> None:
        """Take back the last columns, which are fresh; padding has none but the first of them."""
        tokens = min(last, self.seen)
        self.seen, self.since, self.fresh = self.seen - tokens, max(self.since - tokens, 0), self.fresh - last
        if self.state is not None:
            left = columns(self.state, slice(0, self.state.slots - tokens))
            self.state = replace(left, seen=torch.tensor([self.seen])) if left.slots else None
