"""A layer of kvpress's cache whose first slots are centroids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from centroidkv.errors import BackendError, CacheError
from centroidkv.integrations.kvpress.loan import Loan
from centroidkv.integrations.transformers.attention import attention_of, takes_handovers
from centroidkv.integrations.transformers.caller import find_caller
from centroidkv.integrations.transformers.checks import check_received, check_sent
from centroidkv.integrations.transformers.handover import Handover
from centroidkv.state import KVState

AGAIN = "press the context again, into a new cache"


class PressedLayer(DynamicLayer):
    """A DynamicLayer that begins with a compressed context and passes ln N on to the attention.

    ``keys [B, H, P + n, D]``: P slots of the context, whose ``degree [B, H, P]`` (float32) says how many tokens each
    stands for, then n tokens as they come. As everywhere in kvpress ``get_seq_length`` counts slots, and whoever
    decodes says the positions; its pipeline does.

    Raises:
        CacheError: the context's slots are cut, as another press or ``crop`` would.
        BackendError: the model attends with a function that would ignore the degrees.
    """

    def __init__(self, state: KVState, loan: Loan | None) -> None:
        super().__init__()
        self.degree, self._loan = state.degree, loan
        self._handed: Handover | None = None
        self.lazy_initialization(state.keys, state.values)
        self.keys, self.values = state.keys, state.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note types and devices; there is nothing to allocate."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    # Properties, so that a press or a pipeline that writes to the layer is checked at once.
    @property
    def keys(self) -> Tensor:
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._keys = self._checked(keys)

    @property
    def values(self) -> Tensor:
        return self._values

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._values = self._checked(values)

    def _checked(self, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.empty(0)  # the base class's __init__, before there is anything
        pressed = self.degree.shape[2]
        if tensor.ndim != 4 or tensor.shape[2] < pressed:
            raise CacheError(
                f"the first {pressed} slots of this layer are centroids with degrees of their own, and something "
                f"(another press, crop, reset) cut the layer to {tuple(tensor.shape)}. Nothing can be removed after "
                "CentroidPress: use it alone or last, and a new cache for every context"
            )
        return tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and hand the degrees to the attention function that is called next."""
        config = self._check_attention()
        attention = attention_of(config)
        self.keys = torch.cat((self.keys, key_states), 2)
        self.values = torch.cat((self.values, value_states), 2)
        own = self.keys.new_ones(*self.keys.shape[:2], self.keys.shape[2] - self.degree.shape[2], dtype=torch.float32)
        keys, values = self.keys, self.values
        self._handed = Handover(keys, values, torch.cat((self.degree.to(own.device), own), 2), config=config)
        check_sent(self._handed, attention)
        return self._handed.attach(), values

    def check_attended(self, module: str) -> None:
        """Raise BackendError if attention module ``module``, which has just run, did not take what it was handed."""
        handed, self._handed = self._handed, None
        check_received(handed, module, AGAIN)

    def _check_attention(self) -> Any:
        """The model's configuration, if its attention takes degrees."""
        check_received(self._handed, remedy=AGAIN)
        caller = find_caller()
        if caller is None or not takes_handovers(caller.module.config):
            seen = "unknown" if caller is None else repr(caller.module.config._attn_implementation)
            raise BackendError(
                f"this cache holds merged tokens, and the attention of the model that reads it ({seen}) would ignore "
                "their degrees; read it with the model that filled it, or inside `with enable(model):` from "
                "centroidkv.integrations.transformers"
            )
        if getattr(caller.module, "masked_key_indices", None) is not None:
            raise CacheError(
                "another press (AdaKV, DMS, KVzap, KVzip, ...) masks single keys of this layer, whose indices mean "
                "nothing once the keys are merged; use CentroidPress without it"
            )
        return caller.module.config

    def reset(self) -> None:
        raise CacheError("a pressed layer stands for one context; make a new cache for the next")

    def crop(self, max_length: int) -> None:
        """Down to ``max_length`` slots, or less ``-max_length`` if negative; CacheError if that cuts the context."""
        left = max_length if max_length >= 0 else self.keys.shape[2] + max_length
        if left < self.keys.shape[2]:
            self.keys, self.values = self.keys[:, :, : max(left, 0)], self.values[:, :, : max(left, 0)]

    # Rows move with their degrees.
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._move(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._move(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._move(lambda x: x[indices.to(x.device)])

    def _move(self, change: Any) -> None:
        self.keys, self.values, self.degree = change(self.keys), change(self.values), change(self.degree)
