"""What a mask says: which new tokens are padding, and what it adds to the slots before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import CacheError

HIDDEN = -1000.0
"""An additive mask hides a token by this number or less, for e^-1000 is 0 in every floating-point type. A softer number
weighs a token, it does not hide it."""
PART = 1024
"""Columns that are looked at together with all queries: masks of long prompts are large."""

_MADE = "_centroidkv_from_padding"


def made_from_padding(make: Callable[..., Any]) -> Callable[..., Any]:
    """The mask function ``make`` of transformers, whose 4-D masks can afterwards be told from those of other origin.

    They have a column per token before the new ones and hide there what the 2-D padding mask hides; a caller's mask, or
    one that a model computes from its values, may mean something else by the same numbers.
    """

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if isinstance(made, Tensor) and not torch.compiler.is_compiling():
            setattr(made, _MADE, True)
        return made

    return mask


def is_made_from_padding(mask: Tensor) -> bool:
    """Whether transformers made this mask for one of our attention functions."""
    return bool(getattr(mask, _MADE, False))


def hidden(mask: Tensor) -> Tensor:
    """Where a mask hides: False in a bool mask, 0 in one of whole numbers, HIDDEN or less in an additive one."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= HIDDEN if mask.is_floating_point() else mask == 0


def real_columns(mask: Any, batch: int, new: int) -> Tensor | None:
    """Which of the ``new`` last columns are real tokens, ``[B, new]`` bool; None if all are.

    A column is padding only if no query of the step sees it, its own included. A token that later tokens may not see
    (another document's, a chunk's) sees itself; padding is hidden even from itself.

    Args:
        mask: what the attention function is about to apply: nothing, a 4-D mask ``[B or 1, Hq or 1, L or 1, S]``, bool
            or additive, flash attention's 2-D mask ``[B, S]``, or flex attention's BlockMask.
        batch: B.
        new: L.

    Raises:
        CacheError: a mask of a kind that cannot be read.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = ~hidden(mask[:, -new:])
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        tail = mask[..., -new:]
        real = _seen(
            lambda columns: (~hidden(tail[..., columns])).any(1),
            ~hidden(tail.diagonal(dim1=-2, dim2=-1)).any(1) if tail.shape[-2] == new else None,
            new,
        )
    elif hasattr(mask, "mask_mod"):
        queries, total = mask.seq_lengths
        device = mask.kv_num_blocks.device
        row, head = torch.arange(batch, device=device), torch.zeros((), dtype=torch.long, device=device)
        query, column = (torch.arange(n - new, n, device=device) for n in (queries, total))
        real = _seen(
            lambda some: mask.mask_mod(row[:, None, None], head, query[None, :, None], column[some][None, None]).expand(
                batch, new, len(some)
            ),
            mask.mask_mod(row[:, None], head, query[None], column[None]).expand(batch, new),
            new,
        )
    else:
        raise CacheError(f"cannot read padding from a mask of type {type(mask).__name__}")
    return None if bool(real.all()) else real.expand(batch, new)


def _seen(pairs: Callable[[Tensor], Tensor], own: Tensor | None, new: int) -> Tensor:
    """Which columns any query sees. ``own [B, L]``: each by its own query; ``pairs`` of some: ``[B, L, columns]``."""
    if own is None:
        return torch.cat([pairs(part).any(-2) for part in torch.arange(new).split(PART)], -1)
    seen = own.clone()
    for part in (~own).any(0).nonzero()[:, 0].split(PART):
        seen[:, part] |= pairs(part).any(-2)
    return seen


def before_new(mask: Tensor, padding: Tensor | None, real: Tensor | None, new: int) -> Tensor | None:
    """The part of a 4-D mask before the ``new`` last columns, ``[B, Hq, L, S - L]``; None where padding explains it.

    Explained is a part that hides ``padding [B, S - L]`` (None: nothing) from every query of a real token
    (``real [B, L]``; None: all are), and neither hides nor weighs anything else.
    """
    part = mask[..., : mask.shape[-1] - new]
    if part.shape[-1] == 0:
        return None
    hides = hidden(part)
    expected = False if padding is None else padding[:, None, None]
    differs = hides != expected
    if part.is_floating_point():
        differs = differs | ((part != 0) & ~hides)
    if real is not None and part.shape[-2] == new:
        differs = differs & real[:, None, :, None]
    return part if bool(differs.any()) else None


def as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as numbers to add to logits; others in ``dtype``."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
