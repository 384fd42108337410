"""What is made once per machine and kept in the user's cache folder: made whole, and looked at before it is used.

Two things are kept: the compiled library, which is run, and models converted from a package. Neither is trusted for
its name. A file may have been cut off (a full disk, a power cut, an interrupted copy of a home folder), and a folder
that others may write to may hold what they put there. So folders are made for the user alone (mode 0700); nothing is
used that somebody else owns or may write to (:func:`why_not_ours`); and everything is checked against the SHA-256
noted when it was made. On Windows, whose permissions are not of this kind, only the last of these is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from centroidkv.errors import BackendError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LIST = "centroidkv-files.json"
"""In a folder that was made here: name, length and SHA-256 of every other file in it."""
PATIENCE = 900.0
"""Seconds to wait for another process that makes the same thing, before making it as well."""


def user_cache() -> Path:
    """Where what is made once per machine is kept: $CENTROIDKV_CACHE, else centroidkv/ in the user's cache folder.

    The latter is $XDG_CACHE_HOME if that is an absolute path, else ``~/.cache``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if own := os.environ.get("CENTROIDKV_CACHE"):
        return Path(own).absolute()
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "centroidkv"


def private_folder(*names: str) -> Path:
    """The folder of these names in :func:`user_cache`, made for the user alone if it is not there yet.

    Raises:
        BackendError: somebody else owns it, or a folder between, or may write to one; says what to do.
        OSError: it cannot be made.
    """
    root = user_cache()
    folder = root.joinpath(*names)
    missing = [level for level in (folder, *folder.parents) if not os.path.lexists(level)]
    for level in reversed(missing):
        level.mkdir(mode=0o700, exist_ok=True)  # whatever the umask: it can only take away
    require_ours(folder, root)
    return folder


def require_ours(path: Path, root: Path) -> None:
    """Raise BackendError with :func:`why_not_ours`, if there is a reason."""
    reason = why_not_ours(path, root)
    if reason is not None:
        raise BackendError(
            f"{reason}, so what lies in it may not be yours and is not used; after making sure of its contents, or "
            "deleting them, make it yours alone (chown, chmod go-w), or set CENTROIDKV_CACHE to a folder of your own"
        )


def why_not_ours(path: Path, root: Path) -> str | None:
    """Why others may have decided what ``path`` leads to: it, a folder up to ``root``, or a link among them.

    Each must be owned by the user or by root, and nobody else may write to it. Where one is a link, so must the link's
    owner be, and what it leads to, and the folder around that (a folder in which only owners may move things, such as
    /tmp, will do there).
    """
    if not hasattr(os, "geteuid"):
        return None
    levels = [path, *(level for level in path.parents if level == root or root in level.parents)]
    for level in levels:
        facts = os.lstat(level)
        if stat.S_ISLNK(facts.st_mode):
            real = Path(os.path.realpath(level))
            reason = _owner(level, facts) or _writable(real, os.stat(real)) or _owner(real, os.stat(real))
            around = os.stat(real.parent)
            if reason is None and not around.st_mode & stat.S_ISVTX:
                reason = _writable(real.parent, around) or _owner(real.parent, around)
        else:
            reason = _owner(level, facts) or _writable(level, facts)
        if reason is not None:
            return reason
    return None


def _owner(path: Path, facts: os.stat_result) -> str | None:
    if facts.st_uid in (os.geteuid(), 0):
        return None
    return f"{path} belongs to user {facts.st_uid}, not to you (user {os.geteuid()}) or root"


def _writable(path: Path, facts: os.stat_result) -> str | None:
    if not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return f"others may write to {path} (mode {stat.S_IMODE(facts.st_mode):04o})"


@contextmanager
def making(folder: Path, name: str) -> Iterator[Path]:
    """A scratch folder inside ``folder`` to make ``name`` in, while no other process makes something in ``folder``.

    It is gone afterwards. What processes that were killed left is removed. Where the file system knows
    no locks, two processes may make the same thing: whoever is later replaces it by its like, in one step.
    """
    with _locked(folder) as alone:
        if alone:
            for left in folder.glob(".*.part"):  # of whatever name: who makes something here holds the lock
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=folder))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the folder could be locked. A lock of a process that ends, however it does, is gone."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        held, until = False, time.monotonic() + PATIENCE
        while not held and time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        try:
            yield held
        finally:
            if held:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child forked meanwhile has the handle, too
    finally:
        os.close(handle)


def to_disk(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of names, would outlast a power cut."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path) -> None:
    """Write the LIST of a folder that is complete, and everything to the disk; nobody else may write to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in (folder, *folder.rglob("*")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    facts = {str(path.relative_to(folder)): [path.stat().st_size, sha256(path)] for path in files}
    (folder / LIST).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    (folder / LIST).chmod(0o600)
    for path in (*files, folder / LIST, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        to_disk(path)


def why_not_whole(folder: Path) -> str | None:
    """What is missing or differs in a folder that was sealed; None if it is as it was. Files added do not matter."""
    try:
        facts = json.loads((folder / LIST).read_text(encoding="utf-8"))
        wrong = [name for name, (size, _) in facts.items() if (folder / name).stat().st_size != size]
        wrong = wrong or [name for name, (_, digest) in facts.items() if sha256(folder / name) != digest]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{folder} is not complete: {error}"
    return f"{folder} is damaged: {', '.join(wrong)}" if wrong else None


def put_in_place(made: Path, final: Path) -> None:
    """``made`` under its final name, in place of what is there, and not lost by a power cut."""
    try:
        made.replace(final)
    except OSError:
        if not final.is_dir():
            raise
        old = made.with_name(made.name + ".old")  # a folder does not replace a folder; this one is in the scratch
        with suppress(FileNotFoundError):
            final.replace(old)
        made.replace(final)
    to_disk(final.parent)
