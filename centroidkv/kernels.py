"""What all Triton kernels share: whether they can run here, and how each is compiled ahead of time.

Triton itself is imported by the ``triton.py`` modules only, and those only when a kernel is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from centroidkv.errors import BackendError, DtypeError, ShapeError

INTERPRET = "TRITON_INTERPRET"
"""The environment variable that makes Triton run kernels as NumPy code on the CPU; read when a kernel is defined."""

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""The storage types kernels take, by Triton's names."""

LARGEST_SIZE = 256
"""The longest key or value a kernel holds at once."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel with one configuration, as ``analysis.tools.compile_kernels`` compiles it without a GPU.

    Args:
        name: unique, for tables: ``"attention split d128 bf16"``.
        kernel: the jitted function.
        signature: argument name -> Triton type (``"*bf16"``, ``"i64"``, ``"fp32"``); no compile-time constants.
        constants: the ``tl.constexpr`` arguments.
        warps: warps per program.
        stages: software pipelining depth.
        default: whether a call uses this configuration on its own; such a one must not spill registers.
    """

    name: str
    kernel: Callable[..., Any]
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    default: bool = True


def why_not_triton(device: torch.device | str) -> str | None:
    """Why Triton kernels cannot run on tensors of ``device``, or None if they can.

    They run on GPUs, and on the CPU through Triton's interpreter, which is for tests: it is thousands of times slower.

    >>> why_not_triton("meta")
    "Triton has no kernels for device type 'meta'"
    """
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):  # AMD's GPUs go by the first name in PyTorch, too
        return f"Triton has no kernels for device type {kind!r}"
    if kind == "cpu" and os.environ.get(INTERPRET) != "1":
        return (
            f"the tensors are on the CPU; Triton needs a GPU, or {INTERPRET}=1 set before its first import "
            "(slow, for tests)"
        )
    # Last, as it looks through folders.
    return None if importlib.util.find_spec("triton") else "the package triton is not installed; pip install triton"


def require_triton(device: torch.device | str) -> None:
    """Refuse with the reason if Triton kernels cannot run on ``device``.

    Raises:
        BackendError: see :func:`why_not_triton`.
    """
    reason = why_not_triton(device)
    if reason is not None:
        raise BackendError(f"backend='triton' was asked for, but {reason}; or use backend='auto'")


def check_rows(rows: Tensor, name: str) -> None:
    """Refuse keys or values that the kernels of a round cannot read.

    Raises:
        ShapeError, DtypeError: not ``[B, H, T, D]`` with D >= 1; none of :data:`TYPES`.
        BackendError: D is over :data:`LARGEST_SIZE`.
    """
    if rows.ndim != 4 or not rows.shape[-1]:
        raise ShapeError(f"{name} must be [B, H, T, D] with D >= 1, got {tuple(rows.shape)}")
    if rows.dtype not in TYPES:
        raise DtypeError(
            f"Triton kernels take {', '.join(map(str, TYPES))}, got {name} of {rows.dtype}; use backend='reference'"
        )
    if rows.shape[-1] > LARGEST_SIZE:
        raise BackendError(
            f"Triton kernels hold rows of up to {LARGEST_SIZE} entries, got {name} of {rows.shape[-1]}; "
            "use backend='reference'"
        )


def check_slots(keys: Tensor, values: Tensor, degree: Tensor, positions: Tensor) -> None:
    """Refuse the tensors of a state that do not fit together, or that the kernels of a round cannot read.

    Raises:
        ShapeError, DtypeError, BackendError: see :func:`check_rows`; degree is not float32 or positions are not
            int32 or int64 ``[B, H, T]``.
    """
    check_rows(keys, "keys")
    check_rows(values, "values")
    if values.shape[:3] != keys.shape[:3] or values.dtype != keys.dtype:
        raise ShapeError(
            f"keys {keys.dtype} {tuple(keys.shape)} and values {values.dtype} {tuple(values.shape)} must agree in "
            "type, B, H and T"
        )
    for name, x, kinds in (
        ("degree", degree, (torch.float32,)),
        ("positions", positions, (torch.int32, torch.int64)),
    ):
        if x.shape != keys.shape[:3]:
            raise ShapeError(f"{name} must be [B, H, T] = {tuple(keys.shape[:3])}, got {tuple(x.shape)}")
        if x.dtype not in kinds:
            raise DtypeError(f"{name} must be {' or '.join(map(str, kinds))}, got {x.dtype}")


def slots_like(
    keys: Tensor, values: Tensor, degree: Tensor, positions: Tensor, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blank tensors for ``slots`` slots of every head, of the same types and sizes otherwise."""
    shape = (*keys.shape[:2], slots)
    return (
        torch.empty(*shape, keys.shape[-1], dtype=keys.dtype, device=keys.device),
        torch.empty(*shape, values.shape[-1], dtype=values.dtype, device=keys.device),
        torch.empty(shape, dtype=degree.dtype, device=keys.device),
        torch.empty(shape, dtype=positions.dtype, device=keys.device),
    )


def padded(size: int) -> int:
    """The power of two that holds ``size``, at least 16: the least that a product of tiles takes.

    >>> padded(96), padded(3)
    (128, 16)
    """
    return max(16, 1 << (size - 1).bit_length())
