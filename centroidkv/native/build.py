"""The C++ library: compiled by the machine's own compiler, kept, checked and loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from centroidkv.errors import BackendError
from centroidkv.kept import making, private_folder, put_in_place, require_ours, to_disk, user_cache

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
MORE_FLAGS = "CENTROIDKV_CXXFLAGS"
"""Names the environment variable whose words follow FLAGS; ``make sanitize`` sets it. Other flags, another library."""
VERSION = 3
"""What ``centroidkv_version()`` in the source says: the arguments that the two sides agree on."""
ASKED, COMPILED = 90.0, 600.0
"""Seconds that a compiler may take to say what it is, and to compile: one that hangs is ended."""


def compiler() -> list[str] | None:
    """The C++ compiler, as the words of a command: ``$CXX``, or the first of g++, c++ and clang++ there is.

    ``$CXX`` may hold several words (``ccache g++``), quoted as a shell has them, or be a path with spaces.
    """
    named = os.environ.get("CXX", "").strip()
    if not named:
        # GCC's OpenMP is the one that PyTorch's builds for Linux bring, so its threads are PyTorch's.
        return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    pieces = named.split(" ")
    for count in range(len(pieces), 0, -1):  # the longest beginning that is a program: a path may hold spaces
        if shutil.which(" ".join(pieces[:count])):
            return [" ".join(pieces[:count]), *shlex.split(" ".join(pieces[count:]))]
    return shlex.split(named)


def run(command: Sequence[str], patience: float) -> tuple[int, str]:
    """Exit status and all that a command says, in whatever encoding; it and what it began are ended after a while.

    Raises:
        OSError: it cannot be started, or was ended.
    """
    alone = {"start_new_session": True} if os.name == "posix" else {}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **alone
    ) as process:  # type: ignore[call-overload]
        try:
            said, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            _end(process)
            raise OSError(f"{shlex.join(command[:3])} ... took longer than {patience:.0f} seconds") from None
        except BaseException:  # an interrupt
            _end(process)
            raise
    return process.returncode, said.decode("utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Compilers are several processes, and one that is left would keep the pipes open."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _machine(command: Sequence[str]) -> str:
    """What compiling for this processor depends on: a folder may be shared by machines that are not alike."""
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(encoding="utf-8", errors="replace") if facts.exists() else platform.processor()
    flags = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model name", "CPU part"))]
    _, version = run([*command, "--version"], ASKED)
    return "\0".join((platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(set(flags)), version))


def load() -> ctypes.CDLL:
    """The library, compiled if there is none that fits or if the one there is was damaged.

    Raises:
        BackendError, OSError, RuntimeError, ValueError: why there is none.
    """
    command = compiler()
    if command is None:
        raise BackendError("there is no C++ compiler (g++, c++ or clang++; $CXX names another)")
    flags = [*FLAGS, *shlex.split(os.environ.get(MORE_FLAGS, ""))]
    facts = "\0".join((SOURCE.read_text(encoding="utf-8"), *flags, *command, _machine(command)))
    stem = f"kernels-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    folder = private_folder("native")
    found = _find(folder, stem)
    if found is None:
        with making(folder, stem) as scratch:
            # Another process may have been faster.
            found = _find(folder, stem) or _compile([*command, *flags], folder, stem, scratch)
    return _open(*found)


def _find(folder: Path, stem: str) -> tuple[Path, bytes] | None:
    """A library whose contents have the SHA-256 that is in its name; others of that stem are removed.

    Raises:
        BackendError: somebody else owns one, or may write to it.
    """
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            require_ours(path, user_cache())
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise BackendError(f"{path} is not a file; delete it")
                data = file.read()
        except FileNotFoundError:  # removed by another process that saw it damaged
            continue
        if path.name == _name(stem, data):
            return path, data
        path.unlink(missing_ok=True)
    return None


def _name(stem: str, data: bytes) -> str:
    return f"{stem}-{hashlib.sha256(data).hexdigest()[:32]}.so"


def _compile(command: Sequence[str], folder: Path, stem: str, scratch: Path) -> tuple[Path, bytes]:
    part = scratch / "kernels.so"
    status, said = run([*command, str(SOURCE), "-o", str(part)], COMPILED)
    if status:
        raise BackendError(f"{command[0]} could not compile it: {said.strip()[-500:]}")
    part.chmod(0o700)
    data = part.read_bytes()
    to_disk(part)
    path = folder / _name(stem, data)
    put_in_place(part, path)
    return path, data


def _open(path: Path, data: bytes) -> ctypes.CDLL:
    """Load just what was checked: from memory of our own where there is such a thing (Linux), else from the file.

    A mapped file would follow its file: cut off later, it ends the process.
    """
    library = _from_memory(data) or ctypes.CDLL(str(path))
    try:
        version, _, _ = library.centroidkv_version, library.centroidkv_attend, library.centroidkv_rounds
    except AttributeError as error:
        raise BackendError(f"{path} is not this library ({error}); delete it") from None
    version.restype = ctypes.c_int64
    if version() != VERSION:
        raise BackendError(f"{path} is version {version()} of the library, needed is {VERSION}; delete it")
    return library


def _from_memory(data: bytes) -> ctypes.CDLL | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        # Never closed: the loader knows libraries by their paths, and a number must not come to mean another one.
        handle = os.memfd_create("centroidkv-kernels", os.MFD_CLOEXEC)
        with open(handle, "wb", closefd=False) as file:
            file.write(data)
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError:  # memory that may not be run (a setting of the system), or no /proc
        return None
