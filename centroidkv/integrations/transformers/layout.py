"""Which layers of a model can be clustered: read off its configuration, before the first token."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from centroidkv.compressor import Compressor
from centroidkv.errors import BudgetNotMetWarning, CacheError
from centroidkv.integrations.transformers.release import text_config

KEEPS_KEYS = frozenset(("full_attention", "attention", "sliding_attention", "chunked_attention"))
"""Layer kinds, as configurations name them, whose cache holds keys and values per token."""

SERVED = "CentroidCache serves layers of full attention, and leaves sliding windows as they are"


def lay_out(config: Any, capacity: str = "growing") -> list[Any]:
    """One entry per decoder layer: None for a layer to compress, transformers' own cache layer for a sliding window.

    Args:
        config: the model's configuration (of the decoder, or one that nests it).
        capacity: "fixed" where no layer may change its size.

    Raises:
        CacheError: a layer keeps something other than keys and values of its own, such as the state of linear
            attention, latents that attention expands, or nothing because it reads another layer's keys.
    """
    config = text_config(config)
    model = f"this {config.model_type!r} model"
    if not getattr(config, "num_attention_heads", None):
        raise CacheError(f"{model} has no attention heads, so its cache holds no keys to cluster; {SERVED}")
    # Not only the cache layers' classes: releases before 5.4 keep a plain DynamicLayer in place of linear attention.
    for index, kind in enumerate(_kinds(config)):
        if kind not in KEEPS_KEYS:
            raise CacheError(f"layer {index} of {model} is of kind {kind!r}, without keys to cluster; {SERVED}")
    if getattr(config, "kv_lora_rank", None):
        raise CacheError(
            f"{model} uses latent attention (kv_lora_rank={config.kv_lora_rank}): what it caches is expanded to keys "
            f"after the cache, where the degrees would be lost; {SERVED}"
        )
    if shared := getattr(config, "num_kv_shared_layers", None):
        raise CacheError(
            f"the last {shared} layers of {model} read the keys of earlier layers, not the cache, and would see them "
            f"without degrees; {SERVED}"
        )
    if crossed := getattr(config, "cross_attention_layers", None):
        raise CacheError(
            f"layers {list(crossed)} of {model} are cross-attention and keep an image's keys in the same cache, not "
            f"those of the sequence's tokens; {SERVED}"
        )
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise CacheError(f"{model} reads cached keys in its early loops without asking for their degrees; {SERVED}")
    layers: list[Any] = []
    for index, stock in enumerate(DynamicCache(config=config).layers):
        if type(stock) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CacheError(
                f"layer {index} of {model} keeps a {type(stock).__name__}, which has no keys to cluster; {SERVED}"
            )
        if capacity == "fixed" and type(stock) is DynamicSlidingWindowLayer:
            raise CacheError(
                f"layer {index} of {model} keeps a sliding window, whose stock cache changes its size; "
                "capacity='fixed' serves models of full attention only, use capacity='growing'"
            )
        layers.append(None if type(stock) is DynamicLayer else stock)
    return layers


def warn_of_nothing(planned: list[Any], config: Any) -> None:
    """Say so where there is no layer to compress."""
    if None not in planned:
        warnings.warn(
            f"all {len(planned)} layers of this {config.model_type!r} model are sliding windows, which bound their own "
            "caches: CentroidCache leaves them as they are and compresses nothing",
            BudgetNotMetWarning,
            stacklevel=3,
        )


def warn_of_room(layers: Sequence[Compressor], config: Any) -> None:
    """Say so where no layer will ever be compressed, because a share of all tokens cannot hold what is preserved."""
    longest = getattr(config, "max_position_embeddings", None) or 2**20
    # A budget of everything has nothing to compress, which is what was asked for.
    if layers and all(layer.budget.slots(longest) < longest and not layer.fits(longest) for layer in layers):
        least = max(layers, key=lambda layer: layer.budget.slots(longest))
        warnings.warn(
            f"nothing will be compressed within the {longest} tokens this {config.model_type!r} model is made for: "
            f"{least.budget!r} is {least.budget.slots(longest)} slots then, too few for what is preserved "
            f"({', '.join(map(repr, least.preservers.members))}) and a centroid. Raise the budget or preserve less",
            BudgetNotMetWarning,
            stacklevel=4,
        )


def _kinds(config: Any) -> list[str]:
    """The kind of each layer, if the configuration says so."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


class RefusedState:
    """Stands for what only other kinds of layers ask of a cache: reading it raises CacheError, whichever release asks.

    Such layers may come before the first one that hands over keys, by which the cache finds its model.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, cache: Any, owner: type) -> Any:
        if cache is None:
            return self
        raise CacheError(
            f"the model asks the cache for {self._name!r}: it has layers that keep no keys to cluster (linear "
            f"attention, convolution or an index); {SERVED}"
        )


class UnboundLayers(list[Any]):
    """The layers of a cache that has not met its model: none. Asking for one says how to name the model."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and not self:
            raise CacheError(
                f"layer {index} was asked for before the cache knew its model, which it learns when the first keys "
                "arrive; name it beforehand: CentroidCache(..., config=model.config)"
            )
        return super().__getitem__(index)


class RefusedPairError(CacheError, AttributeError):
    """A model wants the pair of caches of models with an encoder. An AttributeError, so that ``hasattr`` says False."""


class RefusedPair(RefusedState):
    """Stands for what only the pair of caches of an encoder-decoder model has."""

    def __get__(self, cache: Any, owner: type) -> Any:
        if cache is None:
            return self
        raise RefusedPairError(
            f"the model asks the cache for {self._name!r}, which only the pair of caches of models with an encoder "
            "has; give it EncoderDecoderCache(CentroidCache(...), DynamicCache())"
        )


class RefusesStates:
    """What linear attention, convolutions and indexed attention ask a cache for, in one release or another."""

    self_attention_cache, cross_attention_cache, is_updated = (RefusedPair() for _ in range(3))

    has_previous_state, conv_states, ssm_states, recurrent_states = (RefusedState() for _ in range(4))
    get_conv_state, get_recurrent_state = RefusedState(), RefusedState()
    update_conv_state, update_recurrent_state, update_indexer = (RefusedState() for _ in range(3))
