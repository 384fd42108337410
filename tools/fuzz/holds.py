"""What holds of every cache after every step, whatever the model. Copied into failing scripts."""

from __future__ import annotations

from typing import Any

import torch

from centroidkv.preserve import Recent, Sinks
from tools.fuzz.found import expect
from tools.fuzz.oracle import Held


def check_holds(cache: Any, kinds: list[str], columns: torch.Tensor, before: list[Held], after: list[Held]) -> None:
    """Degrees, positions, preserved slots and statistics, where ``columns [B, tokens]`` says which were real."""
    tokens, seen = columns.shape[1], columns.sum(-1).tolist()
    evicts = bool(getattr(cache.compressor.matching, "evicts", False))
    lossy = "Quantised" in repr(cache.storage)
    for index, (kind, held) in enumerate(zip(kinds, after, strict=False)):  # none are laid out before the first token
        where = f"layer {index}"
        expect(held.logical == tokens, "state", f"{where} counts {held.logical} columns, there were {tokens}")
        if kind == "full" and held.keys is not None:
            _check_layer(held, seen, evicts, cache.compressor, where)
            if before and before[index].keys is not None and not lossy:
                _check_unmerged(before[index], held, where)
    stats = cache.stats()
    filled = [held for held in after if held.degree is not None and held.keys is not None]
    if filled and max(seen):
        expect(stats.logical == max(seen), "state", f"stats say {stats.logical} tokens of {max(seen)}")
        total = stats.physical + stats.merged + stats.evicted
        expect(total == stats.logical, "state", f"stats do not add up: {stats}")
        expect(stats.evicted == 0 or evicts, "state", f"stats say {stats.evicted} evicted, none was")
        expect(stats.bytes > 0 and stats.layers == len(filled), "state", f"stats are {stats}")


def _check_layer(held: Held, all_seen: list[int], evicts: bool, compressor: Any, where: str) -> None:
    degree, positions = held.degree, held.positions
    assert degree is not None
    assert positions is not None
    expect(list(held.seen) == all_seen, "state", f"{where} has seen {held.seen} tokens, not {all_seen}")
    expect(degree.equal(degree.round()) and (degree >= 0).all(), "state", f"{where}: degrees are no counts")
    for row, seen in enumerate(all_seen):
        total, live = degree[row].sum(-1), (degree[row] > 0).sum(-1)
        right = (live if evicts else torch.full_like(live, seen)).to(total.dtype)
        what = f"{where}, row {row}: degrees add up to {total.tolist()}, tokens are {right.tolist()}"
        expect(total.equal(right), "state", what)
        for head in range(degree.shape[1]):
            alive = degree[row, head] > 0
            places = positions[row, head, alive]
            fine = (places.diff() > 0).all() and (places >= 0).all() and (places < max(seen, 1)).all()
            expect(fine, "state", f"{where}, row {row}, head {head}: positions {places.tolist()} of {seen} tokens")
            single = set(places[degree[row, head, alive] == 1].tolist())
            gone = [p for p in _preserved(compressor, seen) if p not in single]
            expect(not gone, "state", f"{where}, row {row}, head {head}: preserved tokens {gone} were merged")


def _preserved(compressor: Any, seen: int) -> set[int]:
    """Positions that always stand alone: sinks, and the recent ones, which only move on."""
    sinks = sum(m.slots for m in compressor.preservers.members if isinstance(m, Sinks))
    recent = sum(m.slots or 0 for m in compressor.preservers.members if isinstance(m, Recent))
    return {*range(min(sinks, seen)), *range(max(seen - recent, 0), seen)}


def _check_unmerged(before: Held, after: Held, where: str) -> None:
    """A slot that stands for what it stood for is what it was, to the last bit."""
    for row, head in torch.cartesian_prod(*(torch.arange(n) for n in after.keys.shape[:2])).tolist():  # type: ignore[union-attr]
        old, new = (_slots(held, row, head) for held in (before, after))
        for place, (degree, key, value) in new.items():
            if place in old and old[place][0] == degree:
                same = old[place][1].equal(key) and old[place][2].equal(value)
                expect(same, "state", f"{where}, row {row}, head {head}: slot of token {place} changed, unmerged")


def _slots(held: Held, row: int, head: int) -> dict[int, tuple[float, torch.Tensor, torch.Tensor]]:
    """Degree, key and value by position."""
    assert held.degree is not None
    assert held.positions is not None
    degrees, places = held.degree[row, head].tolist(), held.positions[row, head].tolist()
    keys, values = held.keys[row, head], held.values[row, head]  # type: ignore[index]
    return {p: (n, keys[i], values[i]) for i, (n, p) in enumerate(zip(degrees, places, strict=True)) if n > 0}
