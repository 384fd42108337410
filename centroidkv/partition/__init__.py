"""Partition: which compressible slots are sources, and which targets they may merge into."""

from centroidkv.partition.alternating import Alternating
from centroidkv.partition.halves import Halves
from centroidkv.partition.random_split import RandomSplit
from centroidkv.partition.strided import Strided

__all__ = ["Alternating", "Halves", "RandomSplit", "Strided"]
