"""Slots whose keys stand out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from centroidkv.errors import ShapeError, StageError
from centroidkv.records import exact_share
from centroidkv.scores import cosine_to_mean, leverage, low_norm, passages
from centroidkv.state import KVState

Score = Callable[[KVState], Tensor]


@dataclass(frozen=True)
class Distinctive:
    """The slots of highest score, per KV head, filling a ``share`` of the free budget.

    What clustering blurs is exactly what resembles nothing else: a number, a name, an identifier. Setting those aside
    and clustering the rest keeps both.

    Args:
        score: "leverage" (least explained by the other keys), "passages" (leverage of keys and values pooled over the
            heads and over neighbouring slots), "cosine" (least like the mean direction), "low_norm",
            or any function ``KVState -> [B, H, T]``, larger = keep.
        share: share of the free budget (the budget less sinks, recent window and other fixed counts), in (0, 1].
        rope: "before" scores keys un-rotated by their positions, so that a key is judged by content and not by
            place; "after" scores keys as cached.
        precision: round scores to this type, such as torch.bfloat16, before they are ranked: equal keys score alike up
            to errors of 1e-7, which would decide between them otherwise. None: they are ranked as computed.

    Ties go to the earliest slot.
    """

    score: str | Score = "leverage"
    share: float = 0.5
    rope: str = "before"
    precision: torch.dtype | None = None

    SCORES: ClassVar[Mapping[str, Score]] = MappingProxyType(
        {"leverage": leverage, "cosine": cosine_to_mean, "low_norm": low_norm, "passages": passages}
    )

    def __post_init__(self) -> None:
        if not callable(self.score) and self.score not in self.SCORES:
            raise StageError(
                f"Distinctive knows the scores {sorted(self.SCORES)} or takes a function of a KVState, "
                f"got {self.score!r}"
            )
        if not 0 < self.share <= 1:
            raise StageError(f"Distinctive takes a share of the free budget in (0, 1], got {self.share!r}")
        if self.rope not in ("before", "after"):
            raise StageError(f"rope is 'before' or 'after', got {self.rope!r}")

    @property
    def needs_rotary(self) -> bool:
        return self.rope == "before"

    @property
    def pools_heads(self) -> bool:
        """Whether a head's slots depend on the keys of the other heads."""
        return self.score in ("passages", passages)

    def count(self, free_budget: int) -> int:
        return math.floor(exact_share(self.share, free_budget))

    def select(self, state: KVState, free: Tensor, count: int) -> Tensor:
        if self.rope == "before":
            state = state.before_rope(self)
        score = self.score(state) if callable(self.score) else self.SCORES[self.score](state)
        if score.shape != free.shape:
            raise ShapeError(f"a score must be [B, H, T] = {tuple(free.shape)}, got {tuple(score.shape)}")
        if self.precision is not None:
            score = score.to(self.precision)
        # Not a sentinel score but two sort keys: first score descending (stable: ties to the earliest), then free.
        order = score.argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, free.gather(-1, order).float().argsort(dim=-1, descending=True, stable=True))
        return free & free.new_zeros(free.shape).scatter(-1, order[..., :count], True)
