"""A small C++ library for the CPU's inner loops, compiled on the machine that runs it.

PyTorch has no operation for what costs most here, and what it has passes over memory once per operation. The source is
part of this package; the first use compiles it with the machine's own compiler for the machine's own processor (some
seconds) and keeps the result in a cache folder. Nothing here is used unless it is asked for (``backend="native"``).

Sections run in parallel on the OpenMP threads that PyTorch has, ``torch.get_num_threads()`` of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from centroidkv.errors import BackendError

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The library's numbers for types of keys and values."""
WIDTH, LARGEST = 16, 1024
"""Key and value sizes must be multiples of the one, and at most the other."""


class Attention(ctypes.Structure):
    """Sizes and strides of an attention call; strides in elements."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "requests", "heads", "groups", "size", "value_size", "block", "splits",
            "q_r", "q_h", "k_n", "k_t", "k_h", "v_n", "v_t", "v_h", "n_n", "n_t", "n_h", "b_r",
        )
    ] + [("scale", ctypes.c_float)]  # fmt: skip


class Rounds(ctypes.Structure):
    """Sizes and strides of a compression; strides in elements."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "slots", "final", "size", "value_size", "chunk", "rounds")),
        *((name, ctypes.c_int64) for name in ("k_r", "k_t", "v_r", "v_t", "by_chunk")),
        ("step", ctypes.c_float),
    ]


def user_cache() -> Path:
    """Where what is made once per machine is kept: $CENTROIDKV_CACHE, else centroidkv/ in the user's cache folder."""
    if own := os.environ.get("CENTROIDKV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "centroidkv"


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ there is."""
    named = os.environ.get("CXX")
    # GCC's OpenMP is the one that PyTorch's builds for Linux bring, so its threads are PyTorch's.
    return named or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def _machine(named: str) -> str:
    """What compiling for this processor depends on: a folder may be shared by machines that are not alike."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.processor()]
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    version = subprocess.run([named, "--version"], capture_output=True, text=True).stdout
    return "\0".join((platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(set(flags)), version))


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    named = compiler()
    if named is None:
        return "there is no C++ compiler (g++, c++ or clang++; $CXX names another)"
    try:
        facts = "\0".join((SOURCE.read_text(), *FLAGS, named, _machine(named)))
        path = user_cache() / "native" / f"kernels-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as made:
                part = Path(made) / path.name
                done = subprocess.run([named, *FLAGS, str(SOURCE), "-o", str(part)], capture_output=True, text=True)
                if done.returncode:
                    return f"{named} could not compile it: {done.stderr.strip()[-500:]}"
                part.replace(path)  # at once: another process may be doing the same
        library = ctypes.CDLL(str(path))
        library.centroidkv_attend.restype = None
        library.centroidkv_rounds.restype = ctypes.c_int
        return library
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        return f"the compiled library cannot be used: {error}"


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
