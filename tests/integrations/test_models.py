"""Conversion of packaged GGUF files, without any: what is refused, and that nothing half-made is left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
