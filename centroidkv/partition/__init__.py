"""Partition: which compressible slots are sources, and which targets they may merge into.

Why alternation is the default. *Theorem*: on a chunk of c slots of similarity f(distance), with f non-increasing
and convex on 1..c-1, alternation has the largest total similarity between the two sides of all splits into floor(c/2)
and ceil(c/2) slots, and is the only such split (up to swapping the sides) if f(1) - 2 f(2) + f(3) > 0. The proof is in
DESIGN.md; tests/partition/test_theorem.py checks it by brute force, with a counter-example for each hypothesis dropped.
Measured similarity is convex only roughly, so this is a reason, not a guarantee.
"""

from centroidkv.partition.alternating import Alternating
from centroidkv.partition.halves import Halves
from centroidkv.partition.random_split import RandomSplit
from centroidkv.partition.strided import Strided

__all__ = ["Alternating", "Halves", "RandomSplit", "Strided"]
