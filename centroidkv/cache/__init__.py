"""Layers of a cache that are compressed as tokens come, and storages; independent of any engine."""

from centroidkv.cache.fixed import FixedState
from centroidkv.cache.growing import GrowingState
from centroidkv.cache.layer_state import LayerState
from centroidkv.cache.offloaded import Offloaded
from centroidkv.cache.quantised import Codes, Quantised, QuantisedState, quantise
from centroidkv.cache.stats import CacheStats
from centroidkv.cache.storage import Exact, Held, Storage

__all__ = [
    "CacheStats",
    "FixedState",
    "GrowingState",
    "LayerState",
    "Storage",
    "Held",
    "Exact",
    "Quantised",
    "Offloaded",
    "quantise",
    "QuantisedState",
    "Codes",
]
