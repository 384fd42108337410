"""Counting what was really compressed, so that a table of short prompts does not pass for one of a compressed cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from centroidkv.integrations.transformers import CentroidCache
from centroidkv.integrations.transformers.layer import CentroidLayer


@dataclass
class Tally:
    """Requests so far, how many of them were never compressed, and the bytes of all caches.

    Args:
        requests: rows of all batches.
        whole: rows whose cache still held every token at the end: shorter than the budget, or than what a preset
            sets aside.
        bytes: bytes that the caches held at the end.
        bytes_full: bytes of the same tokens without compression.
    """

    requests: int = 0
    whole: int = 0
    bytes: int = 0
    bytes_full: int = 0

    def add(self, cache: CentroidCache | None, rows: int) -> None:
        """Count one batch; ``None`` is the plain model's cache, of which nothing is known but its rows."""
        self.requests += rows
        if cache is None:
            self.whole += rows
            return
        stats = cache.stats()
        self.bytes, self.bytes_full = self.bytes + stats.bytes, self.bytes_full + stats.bytes_full
        whole = torch.ones(rows, dtype=torch.bool)
        for layer in cache.layers:
            state = layer.growing.state if isinstance(layer, CentroidLayer) else None
            if state is not None:
                whole &= (state.live.sum(-1).amax(-1) >= state.seen).cpu()
        self.whole += int(whole.sum())

    @property
    def share(self) -> float:
        """Bytes held as a share of the uncompressed ones; 1.0 where nothing was counted."""
        return self.bytes / self.bytes_full if self.bytes_full else 1.0

    def warn(self, log: logging.Logger, label: str) -> None:
        """Say how many requests were not compressed at all, if any."""
        if self.whole and self.bytes_full:
            log.warning(
                "%s: %d of %d requests were not compressed at all: their prompts are within the budget, or shorter "
                "than what the preset sets aside. Their scores are the plain model's",
                label,
                self.whole,
                self.requests,
            )

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {"requests": self.requests, "requests_not_compressed": self.whole, "kept_bytes_share": self.share}
