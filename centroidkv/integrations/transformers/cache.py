"""CentroidCache: a transformers cache that clusters itself while it grows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from centroidkv.cache import CacheStats, GrowingState
from centroidkv.cache.stats import collect_stats
from centroidkv.compressor import Compressor
from centroidkv.errors import BackendError, CacheError, StageError
from centroidkv.integrations.transformers.attention import DegreeTag, log_degree_bias, takes_tags
from centroidkv.integrations.transformers.caller import find_caller, real_tokens
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.release import (
    STOCK_BIAS_BACKENDS,
    STOCK_TAKES_BIAS,
    shared_kwargs,
    text_config,
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

    Raises:
        StageError: not a Compressor, or an interval below 1.
    """

    def __init__(
        self,
        compressor: Compressor,
        interval: int = 128,
        *,
        config: Any = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__(layers=[])
        if not isinstance(compressor, Compressor):
            raise StageError(
                f"CentroidCache takes a Compressor, such as presets.centroidkv(0.25), got {type(compressor).__name__}"
            )
        GrowingState(compressor, interval)  # refuses a bad interval now, not at the first token
        self.compressor, self.interval, self.rotary = compressor, interval, rotary
        self._config: Any = None
        self._pending: DegreeTag | None = None
        if config is not None:
            self._bind(text_config(config))

    def _bind(self, config: Any) -> None:
        """Lay out the layers as the model's configuration says: compress full attention, leave sliding windows."""
        rotary = self.rotary
        if rotary is None and self.compressor.needs_rotary:
            rotary = rotary_of(config)
        layers: list[Any] = []
        for index, stock in enumerate(DynamicCache(config=config).layers):
            if type(stock) is DynamicLayer:
                layers.append(CentroidLayer(GrowingState(self.compressor, self.interval, rotary)))
            elif type(stock) is DynamicSlidingWindowLayer:
                layers.append(stock)
            else:
                raise CacheError(
                    f"layer {index} of this {config.model_type!r} model keeps a {type(stock).__name__}, which has no "
                    "keys to cluster; CentroidCache serves full and sliding-window attention"
                )
        self.layers, self._config = layers, config

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns what this step attends to, and passes ln N on to the attention."""
        new = key_states.shape[2]
        # Decoding single tokens adds no padding, so the caller is not needed once the model is known.
        caller = find_caller() if self._config is None or new > 1 else None
        if self._config is None:
            if caller is None:
                raise BackendError(
                    "the cache cannot see the model that uses it (compiled or wrapped forward pass?); "
                    "tell it: CentroidCache(compressor, config=model.config)"
                )
            self._bind(caller.module.config)
        layer = self.layers[layer_idx]
        if not isinstance(layer, CentroidLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        shared = shared_kwargs(kwargs)
        by_tag = takes_tags(self._config)
        if not by_tag:
            self._check_stock(shared)
        self._check_received()

        mask = caller.attention_mask if caller else None
        if new > 1 and key_states.shape[0] > 1 and caller is None:
            raise CacheError("the cache cannot see the padding mask of this batch (compiled or wrapped forward pass?)")
        keys, values, degree = layer.growing.append(key_states, value_states, real_tokens(mask, new))
        if degree is None:
            return keys, values
        if by_tag:
            self._pending = DegreeTag(degree)
            return self._pending.attach(keys), values
        assert shared is not None  # _check_stock saw to it
        groups = self._config.num_attention_heads // self._config.num_key_value_heads
        bias = log_degree_bias(degree, groups, new).expand(-1, -1, new, -1).to(key_states.dtype)
        own = shared.get("position_bias")
        shared["position_bias"] = bias if own is None else bias + own
        return keys, values

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
    def is_croppable(self) -> bool:
        """False: merged tokens cannot be taken back, so no rollback may be promised."""
        return False

    def reset(self) -> None:
        """Forget all tokens, keep the configuration."""
        super().reset()
        self._pending = None

    def stats(self) -> CacheStats:
        """What was compressed so far: rounds, merged, logical and physical tokens, bytes."""
        return collect_stats(layer.growing for layer in self.layers if isinstance(layer, CentroidLayer))

    def __repr__(self) -> str:
        return f"CentroidCache(interval={self.interval}, {self.stats()})"
