"""Aggregate: what a cluster becomes."""

from centroidkv.aggregate.degree_weighted_mean import DegreeWeightedMean
from centroidkv.aggregate.keep_target_key import KeepTargetKey

__all__ = ["DegreeWeightedMean", "KeepTargetKey"]
