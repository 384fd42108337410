"""CentroidCache: a transformers cache that clusters itself while it grows."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from centroidkv.cache import CacheStats, FixedState, GrowingState, Storage
from centroidkv.cache.stats import collect_stats
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError, CacheError, StageError
from centroidkv.integrations.transformers import saving
from centroidkv.integrations.transformers.attention import DegreeTag, log_degree_bias, takes_tags
from centroidkv.integrations.transformers.caller import find_caller, find_queries, real_tokens
from centroidkv.integrations.transformers.fixed_layer import FixedLayer, check_route, hand_over
from centroidkv.integrations.transformers.heads import check_heads
from centroidkv.integrations.transformers.layer import CentroidLayer, lay_out
from centroidkv.integrations.transformers.release import (
    STOCK_BIAS_BACKENDS,
    STOCK_TAKES_BIAS,
    shared_kwargs,
    text_config,
)
from centroidkv.integrations.transformers.release import (
    query_length as tokens_asked,
)
from centroidkv.integrations.transformers.rope import rotary_of
from centroidkv.rotary import Rotary


class CentroidCache(Cache):
    """Hand it to ``generate``: ``model.generate(**inputs, past_key_values=CentroidCache(presets.distinctive(0.25)))``.

    The prompt is processed with full attention. A layer that is over budget is compressed right after it attended,
    then again every ``interval`` tokens; between two events it holds at most budget + interval slots. Position ids
    keep counting tokens. Sliding-window layers of hybrid models are left alone.

    One cache serves one batch of sequences; ``reset()`` frees it for the next. Where this transformers release or the
    model's attention cannot take degrees from a cache, the first forward pass is refused with a BackendError that
    says so; :func:`~centroidkv.integrations.transformers.enable` then makes it work.

    Args:
        compressor: which stages, which budget.
        interval: tokens between two compressions.
        config: ``model.config``. Not needed normally: the cache finds its model at the first forward pass.
        rotary: how keys are rotated, for models whose RoPE is not recognised.
        storage: how what was compressed is held between steps: ``Quantised(bits=8)``, ``Offloaded()``, or both as
            ``Offloaded(Quantised(bits=8))`` (:mod:`centroidkv.cache`). None: as it is.
        capacity: "growing", or "fixed": buffers of budget + interval slots, for decoding under ``torch.compile``
            without recompilation (:class:`~centroidkv.cache.FixedState`). Needs ``Budget.tokens``.

    Raises:
        StageError: not a Compressor, one whose sizes depend on the data, or an interval below 1.
        BudgetError: capacity="fixed" with a ratio.
    """

    def __init__(
        self,
        compressor: Compressor,
        interval: int = 128,
        *,
        config: Any = None,
        rotary: Rotary | None = None,
        storage: Storage | None = None,
        capacity: Literal["growing", "fixed"] = "growing",
    ) -> None:
        super().__init__(layers=[])
        if not isinstance(compressor, Compressor):
            raise StageError(
                f"CentroidCache takes a Compressor, such as presets.centroidkv(0.25), got {type(compressor).__name__}"
            )
        if not compressor.plannable:
            raise StageError(
                "every layer of a cache must come out equally long, because one mask serves them all; the sizes of "
                f"this compressor depend on the data: {compressor!r}"
            )
        if capacity not in ("growing", "fixed"):
            raise CacheError(f"capacity is 'growing' or 'fixed', got {capacity!r}")
        if capacity == "fixed" and storage is not None:
            raise CacheError(f"capacity='fixed' attends to its buffers as they are; leave storage={storage!r} out")
        self.compressor, self.interval, self.rotary, self.storage = compressor, interval, rotary, storage
        self.capacity = capacity
        self._new_layer(rotary)  # refuses bad arguments now, not at the first token
        self._told = None if config is None else text_config(config)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and the model unless it was named by ``config``; the next forward pass may be any."""
        self.layers: list[Any] = []
        self._config: Any = None
        self._pending: DegreeTag | None = None
        self._real: Tensor | None = None
        self._inner_padding = self._padded = False
        if self._told is not None:
            self._bind(self._told)

    def _bind(self, config: Any) -> None:
        """Lay out the layers as the model's configuration says: compress full attention, leave sliding windows."""
        rotary = self.rotary
        if rotary is None and self.compressor.needs_rotary:
            rotary = rotary_of(config)
        self.layers, self._config = lay_out(config, lambda: self._new_layer(rotary), self.capacity), config

    def _new_layer(self, rotary: Rotary | None) -> CentroidLayer:
        if self.capacity == "fixed":
            return FixedLayer(FixedState(self.compressor, self.interval, rotary))
        return CentroidLayer(GrowingState(self.compressor, self.interval, rotary, self.storage))

    @property
    def _compressed(self) -> list[GrowingState]:
        return [layer.growing for layer in self.layers if isinstance(layer, CentroidLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns what this step attends to, and passes ln N on to the attention."""
        if self.capacity == "growing":
            return self._append(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if layer is None or not layer.ready_for(key_states):
            return torch.compiler.disable(self._append)(key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            layer.growing.begin(1)  # compiled steps are announced by get_mask_sizes, outside their graphs
        shared = check_route(self._config, shared_kwargs(kwargs), self._padded)
        keys, values, degree = layer.growing.step(key_states, value_states)
        hand_over(degree, shared, self._config, key_states.dtype)
        return keys, values

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """(slots that the coming step attends to, offset); with a fixed capacity also the moment to cluster.

        ``generate`` asks before it enters the compiled pass; one compiled by hand asks from within, and breaks here.
        """
        if self.capacity == "fixed":
            self._announce(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    @torch.compiler.disable
    def _announce(self, new: Any) -> None:
        for layer in self.layers:
            layer.growing.begin(tokens_asked(new))
        self._check_level({layer.growing.known_logical for layer in self.layers})

    def _append(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._config is None or self._leads(layer_idx):
            self._begin_step(layer_idx, batch=key_states.shape[0], new=key_states.shape[2])
        if layer_idx >= len(self.layers):
            raise CacheError(
                f"the cache has {len(self.layers)} layers, the model asks for layer {layer_idx}; reset() it"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, CentroidLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        shared = shared_kwargs(kwargs)
        by_tag = takes_tags(self._config)
        if not by_tag:
            self._check_stock(shared)
        self._check_received()
        check_heads(self.compressor, key_states.shape[1], self._config)

        real = None if self._real is None else self._real.to(key_states.device)
        self._padded |= real is not None
        if self.capacity == "fixed":
            check_route(self._config, shared, self._padded)
        queries = find_queries(layer_idx) if self.compressor.needs_queries else None
        keys, values, degree = layer.growing.append(key_states, value_states, real, queries)
        if self.storage is not None:
            self._after(layer_idx).growing.fetch()
        if degree is None:
            return keys, values
        if by_tag:
            self._pending = DegreeTag(degree)
            return self._pending.attach(keys), values
        if self._inner_padding:
            raise CacheError(
                "the batch holds padding between real tokens, whose mask columns no longer fit the compressed slots; "
                "call enable(model) from centroidkv.integrations.transformers, which masks by slot"
            )
        assert shared is not None  # _check_stock saw to it
        groups = self._config.num_attention_heads // self._config.num_key_value_heads
        bias = log_degree_bias(degree, groups, new=key_states.shape[2]).to(key_states.dtype)
        bias = bias.expand(-1, -1, key_states.shape[2], -1)
        own = shared.get("position_bias")
        shared["position_bias"] = bias if own is None else bias + own
        return keys, values

    def _leads(self, layer_idx: int) -> bool:
        """Whether this is the first compressed layer, at which a step's common facts are read."""
        return next((i for i, layer in enumerate(self.layers) if isinstance(layer, CentroidLayer)), -1) == layer_idx

    def _after(self, layer_idx: int) -> CentroidLayer:
        """The compressed layer that attends next, perhaps in the next step."""
        order = [*self.layers[layer_idx + 1 :], *self.layers[: layer_idx + 1]]
        return next(layer for layer in order if isinstance(layer, CentroidLayer))

    def _begin_step(self, layer_idx: int, batch: int, new: int) -> None:
        """Find the model, and the padding among the new tokens; make sure all layers stand at the same token."""
        caller = find_caller()
        if caller is None and (self._config is None or batch > 1):
            raise BackendError(
                "the cache cannot see the model that uses it, and so neither its attention nor the padding mask "
                "(compiled or wrapped forward pass?); for single sequences CentroidCache(config=model.config) will do"
            )
        if caller is not None:
            if self._config is None:
                self._bind(caller.module.config)
            self._config = caller.module.config  # of the model that is running now, whichever was bound
        self._check_level({layer.logical for layer in self._compressed})
        self._real = None if caller is None else real_tokens(caller.attention_mask, batch, new)
        if self._real is not None and self._leads(layer_idx):
            begun = self._compressed[0].row_started()
            seen = self._real.long().cumsum(-1) + (
                torch.tensor(begun, device=self._real.device)[:, None] if begun else 0
            )
            self._inner_padding |= bool((~self._real & (seen > 0)).any())

    def _check_level(self, tokens: set[int]) -> None:
        if len(tokens) > 1:
            raise CacheError(
                "the layers have seen different numbers of tokens, so an earlier forward pass stopped half-way; "
                "reset() the cache and process the prompt again"
            )

    def _check_stock(self, shared: dict[str, Any] | None) -> None:
        """Refuse attention that would ignore the degrees, before the first token."""
        name = self._config._attn_implementation
        if shared is not None and STOCK_TAKES_BIAS and name in STOCK_BIAS_BACKENDS:
            return
        reason = (
            f"attention {name!r} would ignore the degrees of merged tokens"
            if name not in STOCK_BIAS_BACKENDS
            else "in this transformers release or model a cache cannot hand the degrees to the attention"
        )
        raise BackendError(
            f"{reason}, and the text would be silently wrong. Call enable(model) from "
            "centroidkv.integrations.transformers around generate (for 'sdpa' and 'eager'), or choose another "
            "attn_implementation"
        )

    def _check_received(self) -> None:
        if self._pending is not None and not self._pending.received:
            raise BackendError(
                "the previous layer attended without the degrees it was handed: the keys were changed between the "
                "cache and the attention function. This model is not supported; please report it"
            )

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile decoding steps: with a fixed capacity."""
        return self.capacity == "fixed"

    @property
    def is_croppable(self) -> bool:
        """False: merged tokens cannot be taken back, so no rollback may be promised."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> CentroidCache:
        """A copy with its own tokens, of the same model: its configuration is shared, not frozen as it is now."""
        twin = type(self).__new__(type(self))
        for shared in (self._config, self._told, self.compressor):
            memo[id(shared)] = shared
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def stats(self) -> CacheStats:
        """What was compressed so far: rounds, merged, logical and physical tokens, bytes."""
        return collect_stats(self._compressed)

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything into one safetensors file; see :func:`~.saving.save_cache`."""
        saving.save_cache(self, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        compressor: Compressor,
        *,
        config: Any,
        storage: Storage | None = None,
        device: torch.device | str = "cpu",
        other_compressor: bool = False,
    ) -> CentroidCache:
        """The cache that :meth:`save` wrote, to go on with; see :func:`~.saving.load_cache`."""
        return saving.load_cache(
            cls, path, compressor, config=config, storage=storage, device=device, other_compressor=other_compressor
        )

    def __repr__(self) -> str:
        return f"CentroidCache(interval={self.interval}, {self.stats()})"
