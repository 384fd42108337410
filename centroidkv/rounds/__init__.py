"""Whole rounds at once: partition, similarity, matching and aggregation in one pass over the cache."""
