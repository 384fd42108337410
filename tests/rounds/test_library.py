"""The compiled library as an artefact: how it is made, kept, checked and refused. A stand-in compiler copies it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from centroidkv import native
from centroidkv.errors import BackendError
from centroidkv.native import build

pytestmark = [
    pytest.mark.skipif(native.why_not_native() is not None, reason=str(native.why_not_native())),
    pytest.mark.skipif(os.name != "posix", reason="a stand-in compiler that is a shell script"),
]
ROOT = str(Path(__file__).parents[2])
USE = "from centroidkv import Compressor; Compressor.builder().build('native'); print('built')"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The library of this machine, compiled for these tests; the user's folder may hold some with other flags."""
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CENTROIDKV_CACHE", str(folder))
        patch.delenv(build.MORE_FLAGS, raising=False)
        native._load.cache_clear()
        assert native.why_not_native() is None
        native._load.cache_clear()
    (path,) = (folder / "native").glob("kernels-*-*.so")
    return path


@pytest.fixture
def script(tmp_path, real, monkeypatch):
    """A function (what else the script does, its name) -> a "compiler" that notes its calls and copies ``real``."""
    monkeypatch.setenv("CENTROIDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(build.MORE_FLAGS, raising=False)

    def make(first="", name="compiler", library=real):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/sh\n{first}\nif [ "$1" = --version ]; then echo stand-in; exit 0; fi\n'
            f'echo "$@" >> {shlex.quote(str(tmp_path / "calls"))}\n'
            f'while [ "$1" != -o ]; do shift; done\ncp {shlex.quote(str(library))} "$2"\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    native._load.cache_clear()
    yield make
    native._load.cache_clear()


@pytest.fixture
def calls(tmp_path):
    return lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


def why():
    native._load.cache_clear()
    return native.why_not_native()


def kept_file(tmp_path):
    (path,) = (tmp_path / "cache" / "native").glob("*.so")
    return path


def use(**environment):
    return subprocess.run(
        [sys.executable, "-c", USE], env={**os.environ, "PYTHONPATH": ROOT, **environment}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def test_it_is_compiled_once_into_folders_of_the_user_alone(script, calls, tmp_path):
    before = os.umask(0)
    try:
        script()
        assert why() is None
        assert why() is None
    finally:
        os.umask(before)
    assert len(calls()) == 1
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "cache", tmp_path / "cache/native")] == [0o700, 0o700]
    assert kept_file(tmp_path).stat().st_mode & 0o077 == 0
    assert list((tmp_path / "cache" / "native").iterdir()) == [kept_file(tmp_path)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, "one bit", "somebody's"])
def test_a_file_that_was_cut_off_or_changed_is_compiled_anew(script, calls, tmp_path, share):
    script()
    assert why() is None
    path = kept_file(tmp_path)
    data = path.read_bytes()
    if share == "one bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif share == "somebody's":
        path.write_bytes(Path(torch.__file__).with_name("lib").joinpath("libshm.so").read_bytes())
    else:
        path.write_bytes(data[: int(len(data) * share)])
    assert why() is None
    assert len(calls()) == 2
    assert kept_file(tmp_path).read_bytes() == data


def test_a_cut_off_file_ends_no_process(script, tmp_path):
    script()
    assert why() is None
    os.truncate(kept_file(tmp_path), 5000)
    done = use()
    assert (done.returncode, done.stdout) == (0, "built\n"), done.stderr


def test_what_is_loaded_does_not_follow_its_file(script, tmp_path):
    script()
    code = f"""
        import os, torch
        from centroidkv import Compressor, KVState
        fast = Compressor.builder().preserve().budget(0.5).build("native")
        folder = {str(tmp_path / "cache" / "native")!r}
        (name,) = os.listdir(folder)
        os.truncate(os.path.join(folder, name), 0)
        keys = torch.randn(1, 1, 100, 16)
        print(fast(KVState.from_kv(keys, keys)).slots)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "50\n"), done.stderr


@pytest.mark.parametrize("what", ["cache", "cache/native", "file"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_what_others_may_write_to_is_refused(script, calls, tmp_path, what, mode):
    script()
    assert why() is None
    path = kept_file(tmp_path) if what == "file" else tmp_path / what
    path.chmod(mode)
    assert f"others may write to {path} (mode {mode:04o})" in why()
    with pytest.raises(BackendError, match=r"chmod go-w.*CENTROIDKV_CACHE"):
        native.library()
    path.chmod(0o700)
    assert why() is None
    assert len(calls()) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["cache", "cache/native", "file", "link", "link's owner"])
def test_what_belongs_to_somebody_else_is_refused(script, tmp_path, what):
    script()
    assert why() is None
    path = {"file": kept_file(tmp_path), "cache": tmp_path / "cache"}.get(what, tmp_path / "cache" / "native")
    if what.startswith("link"):
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert why() is None  # a link of the user's own, to a folder of the user's own
        os.chown(path, 65534, 65534, follow_symlinks=what == "link")
    else:
        os.chown(path, 65534, 65534)
    assert "belongs to user 65534, not to you (user 0)" in why()


def test_a_link_into_a_folder_of_others_is_refused(script, tmp_path):
    script()
    assert why() is None
    path, shared = tmp_path / "cache" / "native", tmp_path / "shared"
    shared.mkdir()
    path.rename(shared / "native")
    path.symlink_to(shared / "native")
    shared.chmod(0o777)
    assert f"others may write to {shared}" in why()
    shared.chmod(0o1777)  # as /tmp: only owners may move what is theirs
    assert why() is None


def test_what_is_not_this_library_is_refused(script, tmp_path):
    other = tmp_path / "other.so"
    for source, told in (("int x;", "is not this library"), ('extern "C" { long centroidkv_version() { return 99; } '
                          "void centroidkv_attend() {} void centroidkv_rounds() {} }", "version 99")):  # fmt: skip
        (tmp_path / "other.cpp").write_text(source)
        subprocess.run(["g++", "-shared", "-fPIC", str(tmp_path / "other.cpp"), "-o", str(other)], check=True)
        script(name=told.split()[0], library=other)
        assert told in why()
    (tmp_path / "text").write_text("no library")
    script(name="third", library=tmp_path / "text")
    assert "cannot be used" in why()


@pytest.mark.parametrize("name", ["compiler", "with spaces/my compiler"])
@pytest.mark.parametrize("before", ["", "env "])
@pytest.mark.parametrize("after", ["", " -DX=1 '-DY=a b'"])
def test_compilers_of_several_words_and_with_spaces(script, calls, monkeypatch, name, before, after):
    path = str(script(name=name))
    monkeypatch.setenv("CXX", before + (shlex.quote(path) if before else path) + after)
    assert why() is None
    assert all(("-DX=1 -DY=a b" in call) == bool(after) for call in calls())


def test_output_that_is_no_text_and_quotes_that_do_not_end_are_named(script, monkeypatch):
    script(first="printf '\\377\\376 \\351chec'; [ \"$1\" = --version ] || exit 1")
    assert "could not compile it" in why()
    monkeypatch.setenv("CXX", "g++ 'a")
    assert why() is not None


@pytest.mark.parametrize("when", ["--version", "compile"])
def test_a_compiler_that_hangs_is_ended_with_all_it_began(script, monkeypatch, tmp_path, when):
    test = "=" if when == "--version" else "!="
    script(first=f'if [ "$1" {test} --version ]; then sleep 77 & echo $! > {tmp_path}/child; wait; fi')
    monkeypatch.setattr(build, "ASKED", 1.0)
    monkeypatch.setattr(build, "COMPILED", 1.0)
    assert "took longer than 1 seconds" in why()
    child, until = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        if "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break  # ended; nobody has asked for its status
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_without_a_home_the_reason_is_said(script, monkeypatch):
    script()
    monkeypatch.delenv("CENTROIDKV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert "home directory" in why()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, its definition says
    assert "home directory" in why()


def test_two_processes_compile_once_and_a_killed_one_leaves_nothing_for_long(script, calls, tmp_path, monkeypatch):
    path = script(first='[ "$1" = --version ] || sleep 1')
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", USE]
    several = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=300)[0] for process in several] == ["built\n"] * 3
    assert len(calls()) == 1

    kept_file(tmp_path).unlink()
    text = path.read_text()
    path.write_text(text.replace("sleep 1", f"{{ touch {tmp_path}/begun; exec sleep 60; }}"))
    killed = subprocess.Popen(command, env=environment, start_new_session=True)
    until = time.monotonic() + 240
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    left = list((tmp_path / "cache" / "native").glob(".*.part"))
    assert len(left) == 1
    path.write_text(text)
    assert why() is None
    assert list((tmp_path / "cache" / "native").iterdir()) == [kept_file(tmp_path)]


def test_other_flags_are_another_library(script, calls, monkeypatch):
    script()
    assert why() is None
    monkeypatch.setenv(build.MORE_FLAGS, "-DANOTHER='a b'")
    assert why() is None
    first, second = calls()
    assert "-DANOTHER=a b" in second
    assert "-DANOTHER" not in first


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_too_little_memory_is_a_memory_error(threads):
    """In the rounds and in attention, at every size of what is left."""
    code = f"""
        import resource, torch
        torch.set_num_threads({threads})
        from centroidkv import Compressor, KVState
        from centroidkv.attention import paged_degree_attention
        fast = Compressor.builder().preserve().budget(0.9).build("native")
        def state(slots):
            keys = torch.zeros(1, {threads}, slots, 16); keys.uniform_()
            return KVState.from_kv(keys, keys)
        big, small = state(400_000), state(640)
        wanted = fast(small).keys
        def attend():
            query = torch.zeros(2000, 64, 512); blocks = torch.zeros(1, 16, 1, 512)
            table = torch.zeros(2000, 1, dtype=torch.int32); lengths = torch.ones(2000, dtype=torch.int32)
            return lambda: paged_degree_attention(
                query, blocks, blocks, torch.zeros(1, 16, 1), table, lengths, backend="native")
        attention = attend()
        told = set()
        for work in (lambda: fast(big), attention):
            for room in (10, 40, 100, 150, 200, 260, 300, 360):
                held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (held + room * 2**20, resource.RLIM_INFINITY))
                try:
                    work()
                except (MemoryError, RuntimeError) as error:  # RuntimeError: PyTorch's own allocations
                    told.add(type(error).__name__)
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert fast(small).keys.equal(wanted)
        print(sorted(told))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "MemoryError" in done.stdout
