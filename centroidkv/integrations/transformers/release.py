"""What differs between transformers releases, in one place."""

from __future__ import annotations

import inspect
from typing import Any

from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

STOCK_BIAS_BACKENDS = ("sdpa", "flex_attention")
"""Stock attention functions that add a ``position_bias`` to their logits, in releases that know it (from 5.14)."""

STOCK_TAKES_BIAS = "position_bias" in inspect.signature(sdpa_attention_forward).parameters


def shared_kwargs(update_kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The dict that travels on from ``cache.update`` to the attention function, if this release hands it over.

    From 5.24 attention modules call ``update(key, value, layer_idx, kwargs=kwargs)`` with the very dict they expand
    into the attention call afterwards; earlier releases, and some model families still, pass nothing of the kind.
    """
    shared = update_kwargs.get("kwargs")
    return shared if isinstance(shared, dict) else None


def query_length(argument: Any) -> int:
    """``get_mask_sizes`` receives the number of new tokens, or before 5.4 the tensor of their positions."""
    return argument if isinstance(argument, int) else int(argument.shape[0])


def text_config(config: Any) -> Any:
    """The configuration of the decoder (a multimodal configuration nests it)."""
    return config.get_text_config(decoder=True)


def tokens_to_remove(argument: int, logical: int) -> int:
    """How many tokens ``crop(argument)`` takes back from a cache that has seen ``logical``.

    Negative: that many. Positive: down to that length (releases before 5.24; newer ones never pass it). Zero: nothing,
    except before 5.15, where it was a length like any other.
    """
    if argument < 0:
        return -argument
    if argument == 0 and not _CROP_TAKES_A_LENGTH:
        return 0
    return max(logical - argument, 0)


WINDOW_TAKES = len(inspect.signature(DynamicLayer.lazy_initialization).parameters) - 1
"""How many tensors a layer is prepared with: keys and values, or before 5.0 keys alone."""

_CROP_TAKES_A_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def query_groups(config: Any) -> int:
    """Query heads per KV head, the same on every rank of a tensor-parallel model."""
    return config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
