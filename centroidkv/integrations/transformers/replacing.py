"""Files that are replaced in one step: the old one is whole until the new one is, whatever ends the writer."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed, so no lock is needed
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(final: Path, old: os.stat_result | None) -> Iterator[BinaryIO]:
    """A new file beside ``final``, which takes its place at the end, or is gone after an error."""
    stem = f".{final.name}."
    if len(os.fsencode(stem)) > 200:  # names are limited, and the target's may be as long as names can be
        stem = f".{hashlib.sha256(os.fsencode(final.name)).hexdigest()[:32]}."
    _remove_left(final.parent, stem)
    part, handle = _begin(final.parent, stem, 0o666 if old is None else 0o600)
    try:
        with open(handle, "wb", closefd=False) as file:
            yield file
            file.flush()
            os.fsync(handle)
        if old is not None and hasattr(os, "fchmod"):
            if (old.st_uid, old.st_gid) != (os.fstat(handle).st_uid, os.fstat(handle).st_gid):
                with suppress(PermissionError):  # a file can be given away by root only
                    os.fchown(handle, old.st_uid, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
        if fcntl is None:  # Windows renames no open file
            os.close(handle)
            handle = -1
        os.replace(part, final)
    except BaseException:
        with suppress(OSError):  # the error that led here is the one to tell
            part.unlink()
        raise
    finally:
        if handle >= 0:
            os.close(handle)
    with suppress(OSError):  # not every file system can; without, a power cut may bring the old file back, whole
        names = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(names)
        finally:
            os.close(names)


def _begin(folder: Path, stem: str, mode: int) -> tuple[Path, int]:
    """A new file, locked as long as it is open: by this others know that its writer lives."""
    while True:
        part = folder / f"{stem}{secrets.token_hex(4)}.part"
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), mode)
        if fcntl is None:
            return part, handle
        with suppress(OSError):  # not every file system knows locks; then nothing is taken for left behind
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return part, handle
        os.close(handle)  # another save removed it in the moment before it was locked


def _remove_left(folder: Path, stem: str) -> None:
    """Remove what writers that are no more left of this stem."""
    pattern = re.compile(re.escape(stem) + r"[0-9a-f]{8}\.part")
    for entry in os.scandir(folder):
        if not pattern.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        with suppress(OSError):
            if fcntl is None:
                os.unlink(entry.path)
                continue
            handle = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its writer lives
                os.unlink(entry.path)
            finally:
                os.close(handle)
