"""Caches that grow and are compressed as they grow; independent of any engine."""

from centroidkv.cache.growing import GrowingState
from centroidkv.cache.stats import CacheStats

__all__ = ["CacheStats", "GrowingState"]
