"""Matching: which slots join which."""

from centroidkv.matching.all_pairs import AllPairsMatching
from centroidkv.matching.bipartite import BipartiteSoftMatching
from centroidkv.matching.evict import Evict
from centroidkv.matching.kmeans import KMeans
from centroidkv.matching.threshold import ThresholdMatching
from centroidkv.matching.ward import WardMatching

__all__ = ["AllPairsMatching", "BipartiteSoftMatching", "Evict", "KMeans", "ThresholdMatching", "WardMatching"]
