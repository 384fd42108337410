"""The attention function for models whose stock attention cannot take degrees from a cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from centroidkv.attention import degree_attention
from centroidkv.attention.channels import with_degree_channels
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers.handover import KEYWORD, Handover, check_own_bias, received_from
from centroidkv.integrations.transformers.masks import as_additive

PREFIX = "centroidkv_"
WRAPPED = ("sdpa", "eager")
"""Stock functions that add a 4-D mask to their logits as it is, so that a mask can carry ln N."""

LARGEST_FLASH_HEAD = 256

FIXED_DEGREE = "centroidkv_degree"
"""Keyword argument that carries the degrees ``[B, H, C]`` of a fixed-capacity cache. A tag on the keys would be lost in
compiled graphs, where an attribute of a tensor is not part of it."""


def log_degree_bias(degree: Tensor, groups: int, new: int) -> Tensor:
    """Ln N per query head, ``[B, Hq, 1, T]`` float32; 0 for the ``new`` last slots, which the mask takes care of."""
    bias = degree.log()
    bias[..., degree.shape[-1] - new :] = 0.0
    return bias.repeat_interleave(groups, dim=1)[:, :, None, :]


def wrap(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The stock function ``name``, given ln N together with its mask."""

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,  # by position where another library (kvpress) wraps the registered functions
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        stock = functools.partial(_stock(name, module), dropout=dropout)
        if (fixed := _fixed_degree(module, key, value, kwargs)) is not None:
            # One new token, at any slot: every slot answers to its degree alone, and the mask's columns mean nothing.
            if name == "sdpa" and not dropout and kwargs.get("softcap") is None:
                out = degree_attention(query, key, value, fixed, scale=kwargs.get("scaling"))
                return out.transpose(1, 2).contiguous(), None
            bias = fixed.log().to(query.dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            return stock(module, query, key, value, bias[:, :, None, :], **kwargs)
        handed = received_from(key, kwargs)
        if handed is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        return _attend(name, stock, handed, module, query, key, value, attention_mask, dropout, kwargs)

    return forward


@torch.compiler.disable  # sizes change at every step, and the handover is no part of a graph
def _attend(
    name: str, stock: Callable[..., Any], handed: Handover, module: torch.nn.Module, query: Tensor, key: Tensor,
    value: Tensor, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The stock function ``name`` on what a growing layer handed over."""
    handed.accept(module, key, value, attention_mask, kwargs)
    if handed.degree is None:
        if name == "eager" and attention_mask is not None:  # it adds masks as they are, a bool one as zeros and ones
            attention_mask = as_additive(attention_mask, query.dtype)
        return stock(module, query, key, value, attention_mask, **kwargs)
    degree, new, slots = handed.degree_for(key), query.shape[2], key.shape[2]
    old, all_seen = handed.step_of(new, attention_mask).old_slots(attention_mask, slots)
    plain = new == 1 and all_seen and old is None and not dropout and kwargs.get("softcap") is None
    if name == "sdpa" and plain:
        out = degree_attention(query, key, value, degree, scale=kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None
    bias = log_degree_bias(degree, query.shape[1] // key.shape[1], new).expand(-1, -1, new, -1).to(query.dtype)
    if attention_mask is None:
        attention_mask = _unmasked(name, module, new, slots, query.device, kwargs.get("is_causal"))
    # What the mask says of the old slots is content or nothing; the new tokens' columns are the last ones in any case.
    tail = as_additive(attention_mask[..., -new:], bias.dtype)
    if old is None:
        tail = torch.nn.functional.pad(tail, (slots - new, 0))
    else:
        tail = torch.cat((old.to(bias.dtype).clamp(min=torch.finfo(bias.dtype).min), tail), -1)
    return stock(module, query, key, value, (bias + tail).contiguous(), **kwargs)


def _unmasked(
    name: str, module: torch.nn.Module, new: int, slots: int, device: torch.device, is_causal: bool | None
) -> Tensor:
    """The mask ``[1, 1, new, slots]`` that the stock function ``name`` stands in for where it is given none.

    "sdpa" is causal as far as the call or the module says so, "eager" lets every query see everything.
    """
    seen = torch.ones(new, slots, dtype=torch.bool, device=device)
    if name == "sdpa" and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        seen = seen.tril(slots - new)
    return seen[None, None]


def wrap_flash(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The registered function ``name``, which takes no bias, given ln N as two more channels of the keys.

    Degrees mark empty slots and the new tokens' padding as well, so the 2-D padding mask, whose columns are tokens, is
    not needed any more; causality among the new tokens is the kernel's, aligned at the last slot.
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        stock = functools.partial(_stock(name, module), dropout=dropout)
        if (degree := _fixed_degree(module, key, value, kwargs)) is None:
            handed = received_from(key, kwargs)
            if handed is not None:
                handed.accept(module, key, value, attention_mask, kwargs)
            if handed is None or handed.degree is None:
                return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            mask, degree = _as_four_axes(attention_mask), handed.degree_for(key)
            handed.step_of(query.shape[2], mask).old_slots(mask, key.shape[2], bool_per_slot=False)  # refuses, no more
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        wide_query, wide_key = with_degree_channels(query, key, degree, scaling, multiple=8)
        # These kernels want one size for queries, keys and values.
        wide_value = torch.nn.functional.pad(value, (0, wide_key.shape[-1] - value.shape[-1]))
        out, weights = stock(module, wide_query, wide_key, wide_value, None, scaling=scaling, **kwargs)
        return out[..., : value.shape[-1]].contiguous(), weights

    return forward


def is_flash(name: Any) -> bool:
    """Whether this is a kernel of the flash-attention kind: it takes a 2-D padding mask and no bias."""
    return name in ALL_MASK_ATTENTION_FUNCTIONS and ALL_MASK_ATTENTION_FUNCTIONS[name] is flash_attention_mask


def check_flash(name: str, config: Any) -> None:
    """Refuse what two more key channels cannot do."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size + 2 > LARGEST_FLASH_HEAD:
        raise BackendError(
            f"attention {name!r} takes heads of at most {LARGEST_FLASH_HEAD}; with two channels for the degrees this "
            f"model's {size} would be more. Call model.set_attn_implementation('sdpa') first"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise BackendError(
            f"attention {name!r} would cap the degrees together with the logits (attn_logit_softcapping); call "
            "model.set_attn_implementation('eager') first"
        )


def _fixed_degree(module: torch.nn.Module, keys: Tensor, values: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The degrees of a fixed-capacity cache's step, which are taken out of ``kwargs``, if it is one. Traceable."""
    if (degree := kwargs.pop(FIXED_DEGREE, None)) is None:
        return None
    if (handed := kwargs.pop(KEYWORD, None)) is None:  # a compiled step: objects are no part of a graph
        check_own_bias(type(module).__name__, kwargs)
        return degree
    handed.accept(module, keys, values, None, kwargs)
    return handed.degree_for(keys)


def _as_four_axes(mask: Tensor | None) -> Tensor | None:
    """Flash attention's padding mask ``[B, S]``, 1 for tokens, as a bool mask ``[B, 1, 1, S]``."""
    return None if mask is None else (mask != 0)[:, None, None]


def _stock(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    # Eager attention is not registered: each model file has its own, next to its attention classes.
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise BackendError(
        f"{type(module).__name__} has no eager_attention_forward in its module; load the model with "
        "attn_implementation='sdpa'"
    )


def is_ours(attention: str) -> bool:
    """Whether an attention of this name is our function around another, which takes handovers."""
    return attention.startswith(PREFIX)


def takes_handovers(config: Any) -> bool:
    """Whether the model attends through our function now."""
    return is_ours(attention_of(config))


def attention_of(config: Any) -> str:
    """The name of the attention that a model has now; another thread may give it another at any time."""
    return str(config._attn_implementation)
