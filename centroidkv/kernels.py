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

from centroidkv.errors import BackendError

INTERPRET = "TRITON_INTERPRET"
"""The environment variable that makes Triton run kernels as NumPy code on the CPU; read when a kernel is defined."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel with one configuration, as ``analysis.compile_kernels`` compiles it without a GPU.

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
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    kind = torch.device(device).type
    if kind == "cuda":  # AMD's GPUs go by the same name in PyTorch
        return None
    if kind == "cpu":
        if os.environ.get(INTERPRET) == "1":
            return None
        return (
            f"the tensors are on the CPU; Triton needs a GPU, or {INTERPRET}=1 set before its first import "
            "(slow, for tests)"
        )
    return f"Triton has no kernels for device type {kind!r}"


def require_triton(device: torch.device | str) -> None:
    """Refuse with the reason if Triton kernels cannot run on ``device``.

    Raises:
        BackendError: see :func:`why_not_triton`.
    """
    reason = why_not_triton(device)
    if reason is not None:
        raise BackendError(f"backend='triton' was asked for, but {reason}; or use backend='auto'")
