"""Similarity: how alike two keys are; larger is more alike."""

from centroidkv.similarity.cosine import Cosine
from centroidkv.similarity.dot import Dot
from centroidkv.similarity.expected_logits import ExpectedLogits
from centroidkv.similarity.negative_euclidean import NegativeEuclidean

__all__ = ["Cosine", "Dot", "ExpectedLogits", "NegativeEuclidean"]
