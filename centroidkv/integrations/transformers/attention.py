"""The attention function for models whose stock attention cannot take degrees from a cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from centroidkv.attention import degree_attention
from centroidkv.attention.channels import with_degree_channels
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers.layout import lay_out
from centroidkv.integrations.transformers.release import STOCK_BIAS_BACKENDS, STOCK_TAKES_BIAS, text_config

PREFIX = "centroidkv_"
WRAPPED = ("sdpa", "eager")
"""Stock functions that add a 4-D mask to their logits as it is, so that a mask can carry ln N."""

LARGEST_FLASH_HEAD = 256

_TAG = "_centroidkv_degree"

FIXED_DEGREE = "centroidkv_degree"
"""Keyword argument that carries the degrees ``[B, H, C]`` of a fixed-capacity cache. A tag on the keys would be lost in
compiled graphs, where an attribute of a tensor is not part of it."""


class DegreeTag:
    """Degrees that travel on a key tensor from the cache to our attention function, which signs for them."""

    def __init__(self, degree: Tensor) -> None:
        self.degree = degree
        self.received = False

    def attach(self, keys: Tensor) -> Tensor:
        """``keys`` with this tag; the same storage."""
        setattr(keys, _TAG, self)
        return keys


def log_degree_bias(degree: Tensor, groups: int, new: int) -> Tensor:
    """Ln N per query head, ``[B, Hq, 1, T]`` float32; 0 for the ``new`` last slots, which the mask takes care of."""
    bias = degree.log()
    bias[..., degree.shape[-1] - new :] = 0.0
    return bias.repeat_interleave(groups, dim=1)[:, :, None, :]


def _wrap(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
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
        if (fixed := kwargs.pop(FIXED_DEGREE, None)) is not None:
            # One new token, at any slot: every slot answers to its degree alone, and the mask's columns mean nothing.
            if name == "sdpa" and not dropout and kwargs.get("softcap") is None:
                out = degree_attention(query, key, value, fixed, scale=kwargs.get("scaling"))
                return out.transpose(1, 2).contiguous(), None
            bias = fixed.log().to(query.dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            return stock(module, query, key, value, bias[:, :, None, :], **kwargs)
        tag: DegreeTag | None = getattr(key, _TAG, None)
        if tag is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        tag.received = True
        groups, new = query.shape[1] // key.shape[1], query.shape[2]
        plain = attention_mask is None and not dropout and kwargs.get("softcap") is None
        if name == "sdpa" and new == 1 and plain:
            out = degree_attention(query, key, value, tag.degree, scale=kwargs.get("scaling"))
            return out.transpose(1, 2).contiguous(), None
        bias = log_degree_bias(tag.degree, groups, new).expand(-1, -1, new, -1).to(query.dtype)
        if attention_mask is None:
            attention_mask = _causal_tail(new, key.shape[2], query.device)
        if attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=bias.dtype).masked_fill(
                ~attention_mask, torch.finfo(bias.dtype).min
            )
        # Old slots answer to their degrees alone: the mask's old columns are tokens, which no longer have a slot each.
        # The new tokens' columns are the last ones, also of a mask that a user made with a column per token.
        mask = bias + torch.nn.functional.pad(attention_mask[..., -new:], (key.shape[2] - new, 0))
        return stock(module, query, key, value, mask.contiguous(), **kwargs)

    return forward


def _wrap_flash(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
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
        tag: DegreeTag | None = getattr(key, _TAG, None)
        if tag is None:
            return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        tag.received = True
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        wide_query, wide_key = with_degree_channels(query, key, tag.degree, scaling, multiple=8)
        # These kernels want one size for queries, keys and values.
        wide_value = torch.nn.functional.pad(value, (0, wide_key.shape[-1] - value.shape[-1]))
        out, weights = stock(module, wide_query, wide_key, wide_value, None, scaling=scaling, **kwargs)
        return out[..., : value.shape[-1]].contiguous(), weights

    return forward


def _is_flash(name: Any) -> bool:
    """Whether this is a kernel of the flash-attention kind: it takes a 2-D padding mask and no bias."""
    return name in ALL_MASK_ATTENTION_FUNCTIONS and ALL_MASK_ATTENTION_FUNCTIONS[name] is flash_attention_mask


def _check_flash(name: str, config: Any) -> None:
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


def _causal_tail(new: int, slots: int, device: torch.device) -> Tensor:
    """[1, 1, new, slots] bool: the last ``new`` slots are the queries' own, hidden from earlier queries."""
    return torch.ones(new, slots, dtype=torch.bool, device=device).tril(slots - new)[None, None]


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


def takes_tags(config: Any) -> bool:
    """Whether the model attends through our function."""
    return str(config._attn_implementation).startswith(PREFIX)


class Enabled:
    """What :func:`enable` returns: undo it with :meth:`undo`, or use it as a context manager."""

    def __init__(self, model: Any, before: str | None) -> None:
        self._model, self._before = model, before

    def undo(self) -> None:
        """Give the model back its own attention function; does nothing if it has been given another meanwhile."""
        if self._before is not None and takes_tags(text_config(self._model.config)):
            self._model.set_attn_implementation(self._before)
        self._before = None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def enable(model: Any) -> Enabled:
    """Let ``model`` attend to degrees, in releases and with back ends whose own attention cannot.

    Switches the model, through its public ``set_attn_implementation``, to a function that calls the stock one with
    ln N added to its mask (and :func:`~centroidkv.attention.degree_attention` for single tokens), or, for kernels of
    the flash-attention kind, to its keys as two channels. Without a compressed cache the stock function is called as it
    is. Harmless where it is not needed.

    Args:
        model: a transformers model that attends with "sdpa", "eager" or a flash attention ("flex_attention" is left
            alone in releases that hand it the degrees themselves).

    Returns:
        A handle: ``handle.undo()``, or ``with enable(model): ...`` which undoes also after an exception.

    Raises:
        BackendError: the model's attention would ignore the degrees and cannot be wrapped.
        CacheError: the model has layers that no CentroidCache serves (linear or latent attention, shared keys).
    """
    lay_out(model.config)
    name = text_config(model.config)._attn_implementation
    if str(name).startswith(PREFIX) or (name in STOCK_BIAS_BACKENDS and name not in WRAPPED and STOCK_TAKES_BIAS):
        return Enabled(model, None)
    flash = _is_flash(name)
    if flash:
        _check_flash(name, text_config(model.config))
    elif name not in WRAPPED:
        raise BackendError(
            f"attention {name!r} cannot be given the degrees of a compressed cache; load the model with "
            f"attn_implementation= one of {WRAPPED} or flash attention, or call model.set_attn_implementation('sdpa')"
        )
    # transformers would look for a package or a hub's kernel behind any name with "flash" or "/" in it.
    ours = PREFIX + name.replace("flash", "channels").replace("/", "_")
    AttentionInterface.register(ours, (_wrap_flash if flash else _wrap)(name))
    AttentionMaskInterface.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(ours)
    return Enabled(model, name)
