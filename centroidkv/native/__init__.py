"""A small C++ library for the CPU's inner loops, compiled on the machine that runs it.

PyTorch has no operation for what costs most here, and what it has passes over memory once per operation. The source is
part of this package; the first use compiles it with the machine's own compiler for the machine's own processor (some
seconds) and keeps the result in a cache folder. Nothing here is used unless it is asked for (``backend="native"``).

Sections run in parallel on the OpenMP threads that PyTorch has, ``torch.get_num_threads()`` of them.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from centroidkv.errors import BackendError
from centroidkv.native.build import FLAGS, SOURCE, compiler, load

__all__ = [
    "FLAGS", "SOURCE", "TYPES", "Attention", "Rounds", "address", "carried_out", "compiler", "library",
    "why_not_native", "why_not_these",
]  # fmt: skip

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The library's numbers for types of keys and values."""
WIDTH, LARGEST = 16, 1024
"""Key and value sizes must be multiples of the one, and at most the other."""


class Attention(ctypes.Structure):
    """Sizes and strides of an attention call; strides in elements."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "requests", "heads", "groups", "size", "value_size", "block", "splits", "threads",
            "q_r", "q_h", "k_n", "k_t", "k_h", "v_n", "v_t", "v_h", "n_n", "n_t", "n_h", "b_r",
        )
    ] + [("scale", ctypes.c_float)]  # fmt: skip


class Rounds(ctypes.Structure):
    """Sizes and strides of a compression; strides in elements."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "slots", "final", "size", "value_size", "chunk", "rounds", "threads")
        ),
        *((name, ctypes.c_int64) for name in ("k_r", "k_t", "v_r", "v_t", "by_chunk")),
        ("step", ctypes.c_float),
    ]


DONE, UNSAFE, NO_MEMORY = 0, 1, 2
"""What a call of the library says; anything else is an impossibility of its own."""


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        library = load()
    except BackendError as error:
        return str(error)
    except (OSError, RuntimeError, ValueError) as error:  # no home folder; $CXX with a quote that does not end
        return f"the compiled library cannot be used: {error}"
    library.centroidkv_attend.restype = ctypes.c_int
    library.centroidkv_rounds.restype = ctypes.c_int
    return library


def why_not_native() -> str | None:
    """Why the native library cannot be used on this machine; None if it can. Compiles it if need be."""
    found = _load()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The native library.

    Raises:
        BackendError: says why it cannot be used.
    """
    found = _load()
    if isinstance(found, str):
        raise BackendError(f"backend='native' was asked for, but {found}; use backend='auto'")
    return found


def why_not_these(*tensors: Tensor) -> str | None:
    """Why the native library cannot work on keys, values and queries like these; None if it can."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        return f"it takes tensors of one type, not {' and '.join(str(tensor.dtype) for tensor in tensors)}"
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"it is for the CPU, not {tensor.device}"
        if tensor.dtype not in TYPES:
            return f"it takes float32 and bfloat16, not {tensor.dtype}"
        if not 0 < tensor.shape[-1] <= LARGEST or tensor.shape[-1] % WIDTH:
            return f"it takes sizes that are multiples of {WIDTH}, not {tensor.shape[-1]}"
    return None


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Where a tensor's first number is."""
    return ctypes.c_void_p(tensor.data_ptr())


def carried_out(outcome: int) -> bool:
    """Whether a call has done its work; if not, its inputs are :data:`UNSAFE`.

    Raises:
        MemoryError: there was not enough; nothing that was computed counts.
        BackendError: the library was called with sizes that contradict each other.
    """
    if outcome == NO_MEMORY:
        raise MemoryError("the compiled library ran out of memory; nothing was changed")
    if outcome not in (DONE, UNSAFE):
        raise BackendError(f"the compiled library says {outcome}: sizes that contradict each other; please report it")
    return outcome == DONE
