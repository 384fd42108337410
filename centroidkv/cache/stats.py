"""What a cache did so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from centroidkv.cache.growing import GrowingState


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


def collect_stats(layers: Iterable[GrowingState]) -> CacheStats:
    """The statistics of the compressed layers of one cache."""
    filled = [layer for layer in layers if layer.like is not None]
    if not filled:
        return CacheStats()
    states = [layer.state for layer in filled if layer.state is not None]
    row = int(states[0].seen.argmax())
    logical = int(states[0].seen[row])
    held = round(fmean(int(state.live[row].sum(-1).amax()) for state in states))
    evicted = logical - round(fmean(float(state.degree[row].double().sum(-1).amax()) for state in states))
    return CacheStats(
        layers=len(filled),
        events=max(layer.events for layer in filled),
        rounds=max(state.rounds for state in states),
        logical=logical,
        physical=held,
        merged=logical - held - evicted,
        evicted=evicted,
        bytes=sum(layer.nbytes for layer in filled),
        bytes_full=sum(layer.nbytes_full for layer in filled),
        seconds=sum(layer.seconds for layer in filled),
    )
