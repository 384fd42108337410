"""Saved caches and everything that may happen to their files: other contents, other headers, full disks, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch.nn.functional import pad

from centroidkv import Compressor, Rotary, presets
from centroidkv.cache import Quantised
from centroidkv.errors import SavedCacheError
from centroidkv.integrations.transformers import CentroidCache, enable, saving_file
from centroidkv.preserve import Recent, Sinks

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
posix = pytest.mark.skipif(os.name != "posix", reason="links, permissions and signals")


def compressor(budget=0.25):
    return Compressor.builder().preserve(Sinks(4), Recent(16)).budget(budget).build()


@pytest.fixture(scope="module")
def hybrid():
    """A model with sliding windows, its file of a padded batch in 8 bits, and how to load it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=32, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture(params=[None, Quantised(8)], ids=["whole", "by rows"])
def file(request, hybrid, tmp_path):
    """(path, load, compute): ``load()`` a cache with queries and a rotation, ``compute(cache)`` the next logits."""
    made, path = presets.balanced(60), tmp_path / "cache"
    rotary = Rotary.from_theta(1e4, 16)
    cache = CentroidCache(made, 16, storage=request.param, rotary=rotary)
    ids = torch.randint(3, 101, (2, 150), generator=torch.Generator().manual_seed(1))
    ids[1, :40] = 0
    with enable(hybrid), torch.no_grad():
        hybrid(ids, attention_mask=(ids != 0).long(), past_key_values=cache)
        hybrid(ids[:, :5] + 1, attention_mask=pad((ids != 0).long(), (0, 5), value=1), past_key_values=cache)
    cache.save(path)

    def load():
        return CentroidCache.load(path, made, config=hybrid.config, storage=request.param)

    def compute(cache):
        mask = pad((ids != 0).long(), (0, 6), value=1)
        with enable(hybrid), torch.no_grad():
            return hybrid(ids[:, :1] + 1, attention_mask=mask, past_key_values=cache).logits

    return path, load, compute


def test_a_loaded_cache_owns_its_memory(file):
    path, load, compute = file
    wanted, overwritten, cut_off = compute(load()), load(), load()
    size = path.stat().st_size
    with path.open("r+b") as other:  # what `cp other cache` does in place
        other.write(b"\xff" * size)
    assert compute(overwritten).equal(wanted)
    os.truncate(path, 0)  # a mapped file would end the process here
    assert compute(cut_off).equal(wanted)


def test_the_file_is_one_that_safetensors_reads(file):
    path, _, _ = file
    tensors = load_file(path)
    with safe_open(path, framework="pt") as other:
        metadata = other.metadata()
    assert saving_file.checksum(metadata[saving_file.HEADER], tensors) == metadata[saving_file.CHECKSUM]


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(file, monkeypatch):
    path, load, _ = file
    begun = saving_file._begun

    def cut(name, handle):
        found = begun(name, handle)
        os.truncate(path, path.stat().st_size // 2)
        return found

    monkeypatch.setattr(saving_file, "_begun", cut)
    with pytest.raises(SavedCacheError, match="cut off while it was read"):
        load()


def rewrite(path, change):
    """The same file with another header and other tensors, checksum and all."""
    with safe_open(path, framework="pt") as other:
        header = json.loads(other.metadata()[saving_file.HEADER])
    tensors = load_file(path)
    path.unlink()
    text = change(header, tensors)
    text = text if isinstance(text, str) else json.dumps(header)
    save_file(tensors, path, {saving_file.HEADER: text, saving_file.CHECKSUM: saving_file.checksum(text, tensors)})


def places(value, path=()):
    """Paths to everything in a header."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield from places(entry, (*path, name))


FREE = {"interleaved": {True, False}, "scaling": {1.5}, "seconds": {1.5}}
"""What may be something else, and what else."""


def test_any_field_that_is_missing_or_of_another_kind_is_refused(file):
    path, load, _ = file
    whole = path.read_bytes()
    with safe_open(path, framework="pt") as other:
        saved = json.loads(other.metadata()[saving_file.HEADER])
    accepted = []
    for place in places(saved):
        if place[:1] == ("model",) and len(place) > 1:
            continue  # compared as a whole
        now = saved
        for name in place:
            now = now[name]
        for wrong in ("gone", -1, 2**70, 1.5, float("nan"), "text", [], {}, None, True):
            free = place and isinstance(wrong, float | bool) and wrong in FREE.get(place[-1], ())
            if free or (type(wrong) is type(now) and wrong == now) or (wrong == "gone" and not place):
                continue

            def change(header, tensors, place=place, wrong=wrong):
                if not place:
                    return json.dumps(wrong)
                inside = header
                for name in place[:-1]:
                    inside = inside[name]
                if wrong == "gone":
                    del inside[place[-1]]
                else:
                    inside[place[-1]] = wrong
                return None

            path.write_bytes(whole)
            rewrite(path, change)
            try:
                load()
                accepted.append((place, wrong))
            except SavedCacheError:
                pass
    assert not accepted


NO_HEADERS = {
    "lists": "[" * 100_000 + "]" * 100_000,
    "tables": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "null": "null",
    "digits": "1" * 5000,
    "only a version": '{"version": 1}',
    "NaN": '{"version": NaN}',
    "nothing": "",
    "twice": '{"version": 1, "version": 1}',
}


@pytest.mark.parametrize("text", NO_HEADERS.values(), ids=NO_HEADERS.keys())
def test_headers_that_are_no_header(file, text):
    path, load, _ = file
    rewrite(path, lambda header, tensors: text)
    with pytest.raises(SavedCacheError):
        load()


def compressed(header):
    return next(layer["compressed"] for layer in header["layers"] if "compressed" in layer)


CONTRADICTIONS = {
    "a clock less": lambda header, tensors: compressed(header)["clocks"].pop(),
    "a number less in a clock": lambda header, tensors: compressed(header)["clocks"][0].pop(),
    "a clock that has seen too much": lambda header, tensors: compressed(header)["clocks"][0].__setitem__(0, 10**9),
    "layers of other lengths": lambda header, tensors: compressed(header).update(logical=10**6),
    "a tensor too many": lambda header, tensors: tensors.update({"layers.7.0.keys": torch.ones(1)}),
    "no window": lambda header, tensors: tensors.pop("layers.0.keys"),
    "no degrees": lambda header, tensors: tensors.pop(next(name for name in tensors if name.endswith("degree"))),
    "another window": lambda header, tensors: header["layers"][0].update(sliding_window=16),
    "a window of other rows": lambda header, tensors: tensors.update(
        {name: tensors[name][:1].contiguous() for name in ("layers.0.keys", "layers.0.values")}
    ),
    "a flat window": lambda header, tensors: tensors.update({"layers.0.keys": tensors["layers.0.keys"].flatten()}),
    "whole numbers for keys": lambda header, tensors: tensors.update(
        {"layers.0.keys": tensors["layers.0.keys"].long(), "layers.0.values": tensors["layers.0.values"].long()}
    ),
    "frequencies in two dimensions": lambda header, tensors: tensors.update({"rotary.inv_freq": torch.ones(2, 2)}),
    "no layers": lambda header, tensors: header.update(layers=[]),
    "a layer twice": lambda header, tensors: header["layers"].append(header["layers"][0]),
    "layers in another order": lambda header, tensors: header["layers"].reverse(),
    "interval 0": lambda header, tensors: header.update(interval=0),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_headers_that_contradict_their_tensors(file, change):
    path, load, _ = file
    rewrite(path, lambda header, tensors: (change(header, tensors), None)[1])
    with pytest.raises(SavedCacheError):
        load()


def test_any_tensor_of_another_shape_or_type_is_refused(file):
    path, load, _ = file
    whole = path.read_bytes()
    accepted = []
    changes = {
        "flat": lambda x: x.flatten()[: x.numel() // 2].contiguous(),
        "one less": lambda x: x[..., :-1].contiguous(),
        "a row less": lambda x: x[:-1].contiguous(),
        "complex": lambda x: torch.zeros(x.shape, dtype=torch.complex64),
        "nothing": lambda x: x.flatten()[:0],
    }
    for name, tensor in load_file(path).items():
        for how, change in changes.items():
            changed = change(tensor)
            if (changed.shape, changed.dtype) == (tensor.shape, tensor.dtype):
                continue
            if how == "one less" and name.split(".")[-1] in ("keys", "values", "queries"):
                continue  # channels, of which the file alone does not tell how many there must be
            if name == "rotary.inv_freq" and how in ("one less", "a row less", "flat", "nothing"):
                continue  # another number of frequencies is another rotation
            path.write_bytes(whole)
            rewrite(
                path, lambda header, tensors, name=name, change=change: tensors.update({name: change(tensors[name])})
            )
            try:
                load()
                accepted.append((name, how))
            except SavedCacheError:
                pass
    assert not accepted


def test_a_sparse_file_of_many_gigabytes_is_refused_by_its_size(file, tmp_path):
    path, load, _ = file
    for begin in (path.read_bytes(), b"", (2**40).to_bytes(8, "little"), (99_000_000).to_bytes(8, "little")):
        path.write_bytes(begin)
        os.truncate(path, 12 * 2**30)
        start = time.process_time()
        with pytest.raises(SavedCacheError):
            load()
        assert time.process_time() - start < 2


@posix
def test_what_is_no_file_is_refused_and_not_waited_for(file, tmp_path):
    path, load, _ = file
    path.unlink()
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)):
        make(path)
        with pytest.raises(SavedCacheError, match=r"not a file|is a directory|not a saved cache"):
            load()
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    os.symlink(path, path)
    with pytest.raises(SavedCacheError):
        load()


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(llama, prompt):
    cache = CentroidCache(compressor(), interval=16)
    with enable(model := llama()), torch.no_grad():
        model(prompt(150), past_key_values=cache)
    return cache


def test_what_cannot_be_written_is_a_saved_cache_error(cache, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("a")
    for wrong in ("folder", "none/cache", "text/cache", "n" * 300, "\0"):
        with pytest.raises(SavedCacheError, match="cannot be written"):
            cache.save(str(tmp_path / wrong))
    longest = tmp_path / ("n" * 255)
    cache.save(longest)
    cache.save(longest)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "text", longest.name}


@posix
def test_links_are_followed_and_permissions_kept(cache, tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "cache", tmp_path / "link"
    link.symlink_to("there/cache")
    cache.save(link)  # to nothing yet
    target.chmod(0o640)
    inode = target.stat().st_ino
    cache.save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert target.stat().st_ino != inode
    assert [path.name for path in target.parent.iterdir()] == ["cache"]
    loop, device = tmp_path / "loop", tmp_path / "device"
    loop.symlink_to(loop)
    device.symlink_to("/dev/null")
    for wrong in (loop, device):
        with pytest.raises(SavedCacheError, match="not a file"):
            cache.save(wrong)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@posix
def test_a_new_files_permissions_are_the_umasks(cache, tmp_path):
    before = os.umask(0o027)
    try:
        cache.save(tmp_path / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o640


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root can become somebody without rights")
def test_without_permission_the_error_is_the_savings_own(cache, tmp_path):
    tmp_path.chmod(0o755)
    cache.save(tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    os.seteuid(65534)
    try:
        with pytest.raises(SavedCacheError, match=r"cannot be written: .*[Pp]ermission"):
            cache.save(tmp_path / "cache")
    finally:
        os.seteuid(0)
    assert (tmp_path / "cache").read_bytes() == before


@posix
def test_a_full_disk_leaves_the_old_file_whole(cache, tmp_path):
    import resource

    path = tmp_path / "cache"
    cache.save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    for share in (0, 100, len(before) // 2, len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (share, limits[1]))
        try:
            with pytest.raises(SavedCacheError, match=r"cannot be written.*untouched"):
                cache.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert [left.name for left in tmp_path.iterdir()] == ["cache"]


SLOW_WRITER = """
    import signal, sys, time, torch
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    from centroidkv.integrations.transformers import saving_file
    bytes_of, done = saving_file._bytes, []
    def slowly(tensor):
        done.append(1)
        if len(done) > 4:  # the checksum reads them, too
            print("half", flush=True)
            time.sleep(60)
        return bytes_of(tensor)
    saving_file._bytes = slowly
    saving_file.write(sys.argv[1], "{}", {name: torch.ones(100_000) for name in "abcd"})
"""


@posix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_writer_that_is_ended_leaves_the_old_file_and_the_next_save_clears_up(cache, tmp_path, number):
    path = tmp_path / "cache"
    cache.save(path)
    before = path.read_bytes()
    (tmp_path / ".cache.notes.part").write_text("somebody else's")
    root = str(Path(__file__).parents[2])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SLOW_WRITER), str(path)], stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout.readline() == "half\n"
        parts = set(tmp_path.glob(".cache.????????.part"))
        assert len(parts) == 2
        writers[0].send_signal(number)
        assert writers[0].wait(timeout=60) != 0
        assert path.read_bytes() == before
        assert len(set(tmp_path.glob(".cache.????????.part"))) == (2 if number == signal.SIGKILL else 1)
        cache.save(path)  # one writer lives: what it writes to stays
        assert len(set(tmp_path.glob(".cache.????????.part"))) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    cache.save(path)
    assert {left.name for left in tmp_path.iterdir()} == {"cache", ".cache.notes.part"}
