"""What is refused at every door of the core, in one place: lost gradients, masks of another kind, changed types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import CacheError, DtypeError, GradientError, MaskError


def refuse_gradients(what: str, *tensors: Tensor) -> None:
    """Refuse tensors whose gradient would be lost: where gradients are being recorded and one of them requires one.

    Args:
        what: who would lose it, for the message: "compressing", "this cache".
        *tensors: keys, values, and whatever else comes out of the model.

    Raises:
        GradientError: says what to do.

    >>> refuse_gradients("compressing", torch.zeros(3))
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise GradientError(
            f"{what} passes no gradients on, and keys or values require them; they would be lost without a word. Run "
            "it under torch.no_grad() or torch.inference_mode(), or pass keys.detach() and values.detach()"
        )


def in_own_types(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products are computed in the types of their factors, whatever autocast is in force around it.

    Autocast holds for one thread: without this, what is computed on the caller's thread would be rounded to 16 bits,
    and what is computed on others would not.
    """
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def on_own_devices() -> AbstractContextManager[Any]:
    """A context in which tensors that name no device are the processor's, whatever default device is in force.

    Plans, splits and places are made there, and moved where they are needed.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def check_fit(held: Any, keys: Tensor, values: Tensor) -> None:
    """Refuse new ``keys`` and ``values`` that are not of the rows, KV heads and types of those that ``held`` has.

    Raises:
        CacheError: says how many rows and heads there are.
        DtypeError: see :func:`check_types`.
    """
    rows, heads = held.keys.shape[:2]
    if keys.shape[:2] != (rows, heads):
        raise CacheError(
            f"the cache holds {rows} rows of {heads} KV heads, the new tokens have {keys.shape[0]} rows of "
            f"{keys.shape[1]}; one cache serves one batch: reset() it, or make another"
        )
    check_types(held, keys, values)


def check_types(held: Any, keys: Tensor, values: Tensor) -> None:
    """Refuse new ``keys`` and ``values`` whose types are not those of the keys and values that ``held`` has.

    Keys and values each have a type of their own; it is a change of either that is refused.

    Raises:
        DtypeError: names both types.
    """
    for name, new in (("keys", keys), ("values", values)):
        old = getattr(held, name)
        if old.dtype != new.dtype:
            raise DtypeError(
                f"the cache holds {name} of {old.dtype}, those of the new tokens are {new.dtype}; cast one of them, "
                "and enter or leave autocast between two sequences only"
            )


def real_tokens(mask: Tensor) -> Tensor:
    """Which tokens are real, as bool, by a padding ``mask`` of bool or of whole numbers 0 and 1.

    Raises:
        MaskError: it holds anything else; an additive mask would be read the wrong way round.
    """
    if mask.dtype == torch.bool:
        return mask
    right = "pass True or 1 for real tokens and False or 0 for padding"
    if mask.is_floating_point() or mask.is_complex():
        raise MaskError(
            f"mask must be bool or whole numbers 0 and 1, got {mask.dtype}: in an additive mask 0 means a real token, "
            f"which would be read the other way round. If it is one, pass mask == 0; else {right}"
        )
    real = mask != 0
    if not bool((mask == real).all()):
        raise MaskError(f"mask must hold 0 and 1 only, got {mask.unique()[:5].tolist()}; {right}")
    return real
