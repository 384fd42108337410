"""A small model in a folder, and a prompt in a file."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    from small_folder import small_folder

    return small_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("hello there, my friend. " * 4)
    return path
