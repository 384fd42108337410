"""The file of a saved cache: written beside its target and renamed, read into memory of our own and checked.

The layout is safetensors': the length of a line of JSON, the line, the tensors' bytes. It is written and read here,
because what is promised depends on every step: that the old file is whole until the new one is, that sizes are checked
before anything is read, and that nothing stays tied to the file (a file that is mapped changes under its reader).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from centroidkv.errors import SavedCacheError
from centroidkv.integrations.transformers.replacing import replacing

HEADER, CHECKSUM = "centroidkv_cache", "sha256"
"""Names of the two entries in the file's metadata."""
LONGEST = 100_000_000
"""Bytes of JSON that are read at most; safetensors has the same limit."""
TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Data types, as safetensors and as PyTorch name them."""


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the header and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


# -- writing ----------------------------------------------------------------------------------------------------------


def write(path: str | PathLike[str], header: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of ``tensors``, on the CPU and contiguous, in place of what ``path`` leads to, links followed.

    The permissions of a file that is replaced are kept. What saves to the same path that were killed left is removed.

    Raises:
        SavedCacheError: it cannot be written; what was there before is whole.
    """
    try:
        final = Path(os.path.realpath(path))
        old = final.lstat() if os.path.lexists(final) else None
        if old is not None and not stat.S_ISREG(old.st_mode):
            raise SavedCacheError(f"{path} cannot be written: it is there, and not a file; choose another name")
        names = {str(getattr(torch, own)): theirs for theirs, own in TYPES.items() if hasattr(torch, own)}
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as safetensors does
        entries: dict[str, Any] = {"__metadata__": {HEADER: header, CHECKSUM: checksum(header, tensors)}}
        end = 0
        for name in order:
            tensor, begin = tensors[name], end
            if str(tensor.dtype) not in names:
                raise SavedCacheError(f"{path} cannot be written: {name} is {tensor.dtype}, which files do not know")
            end += tensor.nbytes
            entries[name] = {
                "dtype": names[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, end],
            }  # fmt: skip
        line = json.dumps(entries).encode()
        line += b" " * (-len(line) % 8)
        with replacing(final, old) as file:
            file.write(len(line).to_bytes(8, "little") + line)
            for name in order:
                file.write(_bytes(tensors[name]))
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        if isinstance(error, SavedCacheError):
            raise
        raise SavedCacheError(f"{path} cannot be written: {error}; what was there before is untouched") from error


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Where a tensor is in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class SavedFile:
    """An open file, of which the line of JSON was read and fits its size."""

    path: Path
    file: BinaryIO
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    def read(self) -> dict[str, Tensor]:
        """All tensors, each in memory of its own.

        Raises:
            SavedCacheError: they are not those that were saved, or the file was cut off meanwhile.
        """
        digest, tensors = hashlib.sha256(self.metadata[HEADER].encode()), {}
        for name in sorted(self.entries):  # the checksum's order
            entry = self.entries[name]
            try:
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
            except (RuntimeError, MemoryError) as error:
                raise SavedCacheError(f"{self.path}: there is no room for {name!r}: {error}") from error
            room = _bytes(tensor)
            self.file.seek(entry.begin)
            taken = 0
            while taken < len(room):
                count = self.file.readinto(room[taken : taken + 2**26])  # type: ignore[attr-defined]
                if not count:
                    raise SavedCacheError(f"{self.path} was cut off while it was read; process the prompt again")
                taken += count
            # Of what is kept, not of what is in the file: that may change at any time.
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(room)
            tensors[name] = tensor
        if self.metadata.get(CHECKSUM) != digest.hexdigest():
            raise SavedCacheError(
                f"{self.path} is damaged: its {CHECKSUM} is not the saved one; process the prompt again"
            )
        return tensors


@contextmanager
def opened(path: str | PathLike[str]) -> Iterator[SavedFile]:
    """The file at ``path``; its sizes fit, its contents were not read yet.

    Raises:
        SavedCacheError: not a saved cache, damaged, cut off, or it cannot be read.
        FileNotFoundError: no such file.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for somebody to write to it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no saved cache at {path}") from None
    except (OSError, ValueError) as error:
        raise SavedCacheError(f"{path} is not a saved cache, or cannot be read: {error}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise SavedCacheError(f"{path} is not a saved cache: it is not a file")
    with open(handle, "rb", buffering=0) as file:
        try:
            yield _begun(Path(path), file)
        except OSError as error:
            raise SavedCacheError(f"{path} cannot be read: {error}") from error


def _begun(path: Path, file: Any) -> SavedFile:
    facts = os.fstat(file.fileno())
    damaged = f"{path} is not a saved cache, or is damaged or cut off"
    length = int.from_bytes(file.read(8), "little")
    if facts.st_size < 8 or not 2 <= length <= min(facts.st_size - 8, LONGEST):
        raise SavedCacheError(f"{damaged}: a line of {length} bytes in a file of {facts.st_size}")
    table = parsed(_exactly(file, length, damaged), damaged)
    metadata = table.pop("__metadata__", {}) if isinstance(table, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SavedCacheError(f"{damaged}: its first line is not a table of tensors")
    if HEADER not in metadata:
        raise SavedCacheError(f"{path} is not a saved cache: a safetensors file without {HEADER!r}")
    entries, ends, start = {}, [], 8 + length
    for name, facts_of in table.items():
        entry, end = _entry(name, facts_of, start, damaged)
        entries[name] = entry
        ends.append((entry.begin, end))
    at = start
    for begin, end in sorted(ends):
        if begin != at:
            raise SavedCacheError(f"{damaged}: its tensors overlap, or leave bytes out")
        at = end
    if at != facts.st_size:
        raise SavedCacheError(f"{damaged}: its tensors end at byte {at}, the file at {facts.st_size}")
    return SavedFile(path, file, metadata, entries)


def _exactly(file: Any, length: int, damaged: str) -> bytes:
    data = b""
    while len(data) < length:
        piece = file.read(length - len(data))
        if not piece:
            raise SavedCacheError(f"{damaged}: it was cut off while it was read")
        data += piece
    return data


def parsed(text: bytes | str, damaged: str) -> Any:
    """JSON as the standard has it: no NaN, no name twice.

    Raises:
        SavedCacheError: it is not, or is nested too deeply.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    def number(name: str) -> float:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise SavedCacheError(f"{damaged}: {error}") from error


def _entry(name: str, facts: Any, start: int, damaged: str) -> tuple[Entry, int]:
    """A tensor's entry, and where it ends."""
    wrong = SavedCacheError(f"{damaged}: its entry for {name[:80]!r} is no tensor's")
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise wrong
    shape, offsets, known = facts["shape"], facts["data_offsets"], facts["dtype"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise wrong
    dtype = getattr(torch, TYPES.get(known, "")) if isinstance(known, str) and known in TYPES else None
    if not isinstance(dtype, torch.dtype) or len(offsets) != 2:
        raise wrong
    if offsets[1] - offsets[0] != math.prod(shape) * torch.empty(0, dtype=dtype).element_size():
        raise wrong
    return Entry(dtype, tuple(shape), start + offsets[0]), start + offsets[1]
