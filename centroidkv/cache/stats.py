"""What a cache did so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from centroidkv.cache.layer_state import LayerState


@dataclass(frozen=True)
class CacheStats:
    """Numbers of one cache. Slots are per KV head, of the longest row, a mean over layers; bytes are sums over layers.

    Args:
        layers: layers that are compressed (hybrid models keep others).
        events: how often clustering ran, in the layer where it did so most.
        rounds: clustering rounds of all events together, in the layer with most of them.
        logical: tokens seen.
        physical: slots held.
        merged: tokens that share a slot of another one. logical = physical + merged + evicted.
        evicted: tokens given up (eviction presets only).
        bytes: bytes held now, on any device: keys and values (or their codes, with steps and lows), degrees, positions.
        bytes_full: bytes of the same tokens' keys and values without compression.
        seconds: wall-clock time spent compressing.
    """

    layers: int = 0
    events: int = 0
    rounds: int = 0
    logical: int = 0
    physical: int = 0
    merged: int = 0
    evicted: int = 0
    bytes: int = 0
    bytes_full: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Bytes held as a share of the uncompressed bytes; 1.0 for an empty cache."""
        return self.bytes / self.bytes_full if self.bytes_full else 1.0

    def __str__(self) -> str:
        return (
            f"{self.logical} tokens in {self.physical} slots ({self.merged} merged, {self.evicted} evicted) after "
            f"{self.rounds} rounds in {self.events} events; {self.bytes / 2**20:.1f} MiB instead of "
            f"{self.bytes_full / 2**20:.1f} MiB ({self.share:.1%})"
        )


def collect_stats(layers: Iterable[LayerState]) -> CacheStats:
    """The statistics of the compressed layers of one cache."""
    filled = [layer for layer in layers if layer.like is not None]
    if not filled:
        return CacheStats()
    facts = [_facts(layer) for layer in filled]  # one layer at a time: a storage assembles what is asked for
    logical, held, lost = facts[0][0], round(fmean(fact[1] for fact in facts)), round(fmean(fact[2] for fact in facts))
    return CacheStats(
        layers=len(filled),
        events=max(layer.events for layer in filled),
        rounds=max(fact[3] for fact in facts),
        logical=logical,
        physical=held,
        merged=logical - held - lost,
        evicted=lost,
        bytes=sum(layer.nbytes for layer in filled),
        bytes_full=sum(layer.nbytes_full for layer in filled),
        seconds=sum(layer.seconds for layer in filled),
    )


def _facts(layer: LayerState) -> tuple[int, int, float, int]:
    """Of the longest row: tokens seen, slots held, tokens given up; and the layer's rounds."""
    state = layer.state
    assert state is not None  # filled
    row = int(state.seen.argmax())
    logical, held = int(state.seen[row]), int(state.live[row].sum(-1).amax())
    return logical, held, logical - float(state.degree[row].double().sum(-1).amax()), state.rounds
