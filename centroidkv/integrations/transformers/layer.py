"""One compressed layer in the shape that transformers expects."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from centroidkv.cache import LayerState
from centroidkv.errors import CacheError
from centroidkv.integrations.transformers.release import query_length, tokens_to_remove

MODELS = ("transformers.models.", "transformers_modules.")
"""Where models' own code lies: transformers' and what it loads from hubs."""


class CentroidLayer(CacheLayerMixin):
    """One layer's state behind transformers' cache-layer interface.

    ``get_seq_length`` counts tokens (position ids go on counting), ``get_mask_sizes`` counts slots: old slots stand
    directly before the new tokens, as in a sliding window, so causal masks need no change. Masks of left padding do no
    harm either: empty slots are at the front, and a row's padding columns never reach beyond them.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, growing: LayerState) -> None:
        # The base class would set keys, values and is_initialized, which are properties here.
        self.growing = growing

    @property
    def keys(self) -> Tensor | None:
        self._check_reader()
        return None if self.growing.state is None else self.growing.state.keys

    @property
    def values(self) -> Tensor | None:
        self._check_reader()
        return None if self.growing.state is None else self.growing.state.values

    def _check_reader(self) -> None:
        """Refuse a model that helps itself to what is held: its attention would see centroids without degrees."""
        reader = str(sys._getframe(2).f_globals.get("__name__"))
        if self.growing.events and reader.startswith(MODELS):
            raise CacheError(
                f"{reader} reads keys or values of the cache directly, without the degrees of clustered slots; this "
                "model is not served"
            )

    @property
    def is_initialized(self) -> bool:
        return self.growing.like is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first append brings shapes and types."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("CentroidCache.update appends to its layers itself, it needs the degrees as well")

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(slots that this step attends to, offset that makes the newest slot the newest token)."""
        return self.growing.physical + query_length(query), self.growing.logical - self.growing.physical

    def get_seq_length(self) -> int:
        """Tokens seen, not slots held."""
        return self.growing.logical

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.growing.clear()

    def offload(self) -> None:
        raise NotImplementedError("a compressed layer is offloaded by its storage: CentroidCache(storage=Offloaded())")

    prefetch = offload

    @property
    def is_croppable(self) -> bool:
        """Whether the next crop of the newest tokens is sure to be exact."""
        return self.growing.waits

    @property
    def record_past(self) -> bool:
        """The name by which transformers switches recording off."""
        return self.growing.waits

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        self.growing.waits = wanted

    def activate_past_recording(self) -> None:
        """Cluster new tokens only after the crop that follows them."""
        self.growing.waits = True

    def crop(self, length: int) -> None:
        """Take back tokens that were not clustered yet; CacheError for others."""
        self.growing.crop(tokens_to_remove(length, self.growing.logical))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.growing.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.growing.like is not None:
            self.growing.reorder(torch.arange(self.growing.like.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.growing.like is not None:
            self.growing.reorder(torch.arange(self.growing.like.batch)[indices.cpu()])
