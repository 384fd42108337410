"""Each row of a batch lived again by itself: it must be clustered at the same moments, to as many slots.

Which slots merge may depend on the last digits of keys, which a batch changes; how many, and when, may not. Copied into
failing scripts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from centroidkv.integrations.transformers import CentroidCache
from tools.fuzz.found import expect
from tools.fuzz.oracle import look


class NotAlone:
    """Rows are not compared, or not any more: something happened that a row alone would count otherwise."""

    def fed(self, life: Any, ids: Any, real: Any, positions: Any, given: Any) -> None:
        """A step was taken."""

    def cropped(self, life: Any, tokens: list[int]) -> None:
        """So many tokens of each row were taken back."""

    def reordered(self, rows: list[int]) -> None:
        """Rows were permuted, dropped or repeated."""


class Alone(NotAlone):
    """One cache per row, with none of the others' padding."""

    def __init__(self, life: Any) -> None:
        self.caches = [
            CentroidCache(life.compressor, life.interval, storage=life.storage, capacity=life.capacity)
            for _ in range(life.batch)
        ]

    @torch.no_grad()
    def fed(self, life: Any, ids: torch.Tensor, real: torch.Tensor, positions: torch.Tensor, given: Any) -> None:
        if given is not None and given.ndim == 4:
            life.alone = NotAlone()
            return
        for row, cache in enumerate(self.caches):
            mine = real[row]
            if bool(mine.any()):
                life.model(ids[row, mine][None], position_ids=positions[row, mine][None], past_key_values=cache)
        self._compare(life)

    def cropped(self, life: Any, tokens: list[int]) -> None:
        for cache, count in zip(self.caches, tokens, strict=True):
            if count:
                cache.crop(-count)
        self._compare(life)

    def reordered(self, rows: list[int]) -> None:
        self.caches = [copy.deepcopy(self.caches[row]) for row in rows]

    def _compare(self, life: Any) -> None:
        for index, held in enumerate(look(life.cache)):
            for row, cache in enumerate(self.caches):
                if held.degree is None or held.keys is None or not cache.layers:
                    continue
                mine = look(cache)[index]
                if mine.degree is None or mine.keys is None:
                    continue
                here, there = ((degree > 0).sum(-1).tolist() for degree in (held.degree[row], mine.degree[0]))
                what = f"layer {index}, row {row}: {here} slots of {held.seen[row]} tokens, alone {there}"
                expect(here == there, "difference", what)
