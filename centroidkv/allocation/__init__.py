"""Allocation: how a model's layers share the budget."""

from centroidkv.allocation.depths import depths_of
from centroidkv.allocation.even import Even
from centroidkv.allocation.middle_layers import MiddleLayers
from centroidkv.allocation.spread import spread

__all__ = ["Even", "MiddleLayers", "depths_of", "spread"]
