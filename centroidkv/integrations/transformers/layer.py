"""One compressed layer in the shape that transformers expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from centroidkv.cache import GrowingState
from centroidkv.errors import CacheError
from centroidkv.integrations.transformers.release import query_length, tokens_to_remove


class CentroidLayer(CacheLayerMixin):
    """A GrowingState behind transformers' cache-layer interface.

    ``get_seq_length`` counts tokens (position ids go on counting), ``get_mask_sizes`` counts slots: old slots stand
    directly before the new tokens, as in a sliding window, so causal masks need no change. Masks of left padding do no
    harm either: empty slots are at the front, and a row's padding columns never reach beyond them.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, growing: GrowingState) -> None:
        # The base class would set keys, values and is_initialized, which are properties here.
        self.growing = growing

    @property
    def keys(self) -> Tensor | None:
        return None if self.growing.state is None else self.growing.state.keys

    @property
    def values(self) -> Tensor | None:
        return None if self.growing.state is None else self.growing.state.values

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


def lay_out(config: Any, new_layer: Callable[[], CentroidLayer], capacity: str) -> list[Any]:
    """The layers of a model's cache: compressed ones for full attention, stock ones for sliding windows.

    Raises:
        CacheError: a layer has no keys to cluster, or grows where ``capacity`` is "fixed".
    """
    layers: list[Any] = []
    for index, stock in enumerate(DynamicCache(config=config).layers):
        if type(stock) is DynamicLayer:
            layers.append(new_layer())
        elif type(stock) is not DynamicSlidingWindowLayer:
            raise CacheError(
                f"layer {index} of this {config.model_type!r} model keeps a {type(stock).__name__}, which has no "
                "keys to cluster; CentroidCache serves full and sliding-window attention"
            )
        elif capacity == "fixed":
            raise CacheError(
                f"layer {index} of this {config.model_type!r} model keeps a sliding window, whose stock cache changes "
                "its size; capacity='fixed' serves models of full attention only, use capacity='growing'"
            )
        else:
            layers.append(stock)
    return layers
