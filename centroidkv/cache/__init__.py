"""Caches that grow and are compressed as they grow; independent of any engine."""

from centroidkv.cache.fixed import FixedState
from centroidkv.cache.growing import GrowingState
from centroidkv.cache.offloaded import Offloaded
from centroidkv.cache.quantised import Codes, Quantised, QuantisedState, quantise
from centroidkv.cache.stats import CacheStats
from centroidkv.cache.storage import Exact, Held, Storage

__all__ = [
    "CacheStats",
    "FixedState",
    "GrowingState",
    "Storage",
    "Held",
    "Exact",
    "Quantised",
    "Offloaded",
    "quantise",
    "QuantisedState",
    "Codes",
]
